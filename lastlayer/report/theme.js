// Before the first paint: the theme chosen last time, if storage can be read.
try {
  const chosen = localStorage.getItem("lastlayer-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch (error) { /* storage is off: follow the system */ }
