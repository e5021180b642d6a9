"""Everything after the logits: projections, losses, heads, decoders and metrics for label sets."""

from lastlayer.loss.lml import LMLFenchelYoungLoss as LMLFenchelYoungLoss
from lastlayer.loss.lml import LMLLoss as LMLLoss
from lastlayer.loss.lml import lml_fenchel_young_loss as lml_fenchel_young_loss
from lastlayer.loss.lml import lml_loss as lml_loss
from lastlayer.project.lml import LML as LML
from lastlayer.project.lml import LMLAtMost as LMLAtMost
from lastlayer.project.lml import LMLThreshold as LMLThreshold
from lastlayer.project.lml import LogLML as LogLML
from lastlayer.project.lml import lml as lml
from lastlayer.project.lml import lml_at_most as lml_at_most
from lastlayer.project.lml import lml_threshold as lml_threshold
from lastlayer.project.lml import log_lml as log_lml
from lastlayer.project.subset import SampleSubset as SampleSubset
from lastlayer.project.subset import SubsetMarginals as SubsetMarginals
from lastlayer.project.subset import sample_subset as sample_subset
from lastlayer.project.subset import subset_log_prob as subset_log_prob
from lastlayer.project.subset import subset_marginals as subset_marginals
from lastlayer.shard import ClassShard as ClassShard

__version__ = "0.1.0"
