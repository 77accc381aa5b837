"""For mypy alone, which reads it beside either twin's modules: does this side keep to ``duel.measure.twin``?"""

import canary
import ceilings
import devices
import network
import profiling
import weights
from duel.measure import twin
from duel.measure.batches import Pool
from duel.measure.device import Setting
from inference import Inference
from per_sample_gradients import PerSampleGradients
from trainer import Trainer
from training import Training

devices_module: twin.DevicesModule = devices
weights_module: twin.WeightsModule = weights
network_module: twin.NetworkModule = network
canary_module: twin.CanaryModule = canary
profiling_module: twin.ProfilingModule = profiling
ceilings_module: twin.CeilingsModule = ceilings


def training(setting: Setting, pool: Pool, arrays: twin.Arrays) -> twin.Training:
    return Training(setting, pool, arrays)


def trainer(setting: Setting, pool: Pool, arrays: twin.Arrays) -> twin.Trainer:
    return Trainer(setting, pool, arrays)


def per_sample_gradients(setting: Setting, pool: Pool, arrays: twin.Arrays) -> twin.PerSampleGradients:
    return PerSampleGradients(setting, pool, arrays)


def inference(setting: Setting, pool: Pool, arrays: twin.Arrays) -> twin.Inference:
    return Inference(setting, pool, arrays)
