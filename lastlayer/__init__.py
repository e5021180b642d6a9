"""Everything after the logits: projections, losses, heads, decoders and metrics for label sets."""

from lastlayer.loss.lml import LMLFenchelYoungLoss as LMLFenchelYoungLoss
from lastlayer.loss.lml import LMLLoss as LMLLoss
from lastlayer.loss.lml import lml_fenchel_young_loss as lml_fenchel_young_loss
from lastlayer.loss.lml import lml_loss as lml_loss
from lastlayer.metrics.angle import angular_error as angular_error
from lastlayer.metrics.angle import rotation_error as rotation_error
from lastlayer.metrics.at_k import f1_at_k as f1_at_k
from lastlayer.metrics.at_k import ndcg_at_k as ndcg_at_k
from lastlayer.metrics.at_k import precision_at_k as precision_at_k
from lastlayer.metrics.at_k import propensity as propensity
from lastlayer.metrics.at_k import psp_at_k as psp_at_k
from lastlayer.metrics.at_k import r_precision_at_k as r_precision_at_k
from lastlayer.metrics.at_k import recall_at_k as recall_at_k
from lastlayer.metrics.at_k import top_k_accuracy as top_k_accuracy
from lastlayer.metrics.average_precision import mean_average_precision as mean_average_precision
from lastlayer.metrics.bootstrap import bootstrap as bootstrap
from lastlayer.metrics.calibration import fit_temperature as fit_temperature
from lastlayer.metrics.calibration import label_calibration_error as label_calibration_error
from lastlayer.metrics.calibration import reliability_bins as reliability_bins
from lastlayer.metrics.openset import auroc as auroc
from lastlayer.metrics.openset import mean_max_confidence as mean_max_confidence
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
