"""Differential fuzzing: hostile rows for every projection and loss, on every implementation, against one reference.

``make fuzz MINUTES=10`` runs on and says how many cases it did; a case that fails is shrunk and written to
``corpus.json``, which the tests replay. A new function joins by one line in the table of `ops.py`.
"""
