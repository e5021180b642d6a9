"""Linear models that are solved exactly: one classifier per label, flat or in a tree of labels."""

from lastlayer.train.linear.solver import LinearWeights as LinearWeights
from lastlayer.train.linear.solver import SolverSettings as SolverSettings
from lastlayer.train.linear.solver import Weighting as Weighting
from lastlayer.train.linear.solver import fit_linear as fit_linear
from lastlayer.train.linear.solver import fit_path as fit_path
