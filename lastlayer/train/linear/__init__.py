"""Linear models that are solved exactly: one classifier per label, flat or in a tree of labels."""

from lastlayer.train.linear.solver import LinearWeights as LinearWeights
from lastlayer.train.linear.solver import SolverSettings as SolverSettings
from lastlayer.train.linear.solver import Weighting as Weighting
from lastlayer.train.linear.solver import fit_linear as fit_linear
from lastlayer.train.linear.solver import fit_path as fit_path
from lastlayer.train.linear.tree import LinearTree as LinearTree
from lastlayer.train.linear.tree import TreeSettings as TreeSettings
from lastlayer.train.linear.tree import choose_tree as choose_tree
