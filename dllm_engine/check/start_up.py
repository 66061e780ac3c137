"""What an engine checks when it starts on a CUDA device: each kernel against its plain version, at the model's sizes.

Checks run once per GPU, versions, sizes and type, and their results are kept in vLLM's cache folder. A kernel that
differs or raises is replaced: an operator by its plain kernel, which CUDA tensors then get too; vLLM's normalization
and gate by PyTorch's; dense attention by PyTorch's. After an illegal memory access nothing runs on the device any more,
so that start ends with an error, and the next one leaves the kernel out.
"""

import hashlib
import itertools
import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.logger import init_logger

import dllm_engine.kernels
from dllm_engine.check.checks import FAILED, Check, Outcome, run_checks
from dllm_engine.check.dense import dense_check
from dllm_engine.check.operators import Sizes, operator_checks
from dllm_engine.evaluation.machine import provenance
from dllm_engine.kernels._operator import plain_on_cuda
from dllm_engine.kernels.attention import use_dense_backend
from dllm_engine.kernels.dense_backends import attend_with_sdpa
from dllm_engine.options import EngineOptions

logger = init_logger(f"vllm.{__name__}")

DENSE = "dense attention"
_OF_LOGITS = ("token_statistics", "gumbel_max")
"""Operators that filters give float32 whatever the model's type."""
_VERSIONS = ("processor", "compute_capability", "driver", "torch", "triton", "vllm", "dllm_engine")


def take_right_kernels(vllm_config: VllmConfig, device: torch.device) -> None:
    """Check the kernels that an engine's rank will use on its device, and replace those that fail.

    To be called once the runner has chosen its dense attention, and before the model is built, which looks its
    normalization up. Every rank checks its own device; a kernel that fails on one is replaced on all, because some
    numbers are computed by each rank alone and must not differ even in rounding.
    """
    if device.type != "cuda":
        return
    options = EngineOptions.from_vllm_config(vllm_config)
    ranks = get_tp_group()
    configs = [vllm_config.model_config.hf_config]
    if options.guide_model is not None:
        configs.append(AutoConfig.from_pretrained(options.guide_model))
    models = [Sizes.of_model(config, options.page_size, ranks.world_size) for config in configs]
    dense = {"auto": "flash", "sdpa": None}.get(options.dense_attention, options.dense_attention)
    found = check_kernels_once(device, vllm_config.model_config.dtype, models, dense, Path(envs.VLLM_CACHE_ROOT))
    of_ranks: list[dict[str, str]] = [found] * ranks.world_size
    if ranks.world_size > 1:
        torch.distributed.all_gather_object(of_ranks, found, group=ranks.cpu_group)
    for operator, reason in dict(itertools.chain.from_iterable(each.items() for each in of_ranks)).items():
        if operator == DENSE:
            use_dense_backend(attend_with_sdpa)
        else:
            plain_on_cuda.add(operator)
        if ranks.rank_in_group == 0:
            logger.warning(
                "The kernel of %s fails its check on %s (%s). Its plain version takes its place, and steps take "
                "longer. Run `dllm check` and report what it says",
                *(operator, torch.cuda.get_device_name(device), reason),
            )


def check_kernels_once(
    device: torch.device, dtype: torch.dtype, models: Sequence[Sizes], dense: str | None, cache_root: Path
) -> dict[str, str]:
    """What fails of the kernels for these sizes, by what was measured now or in an earlier start.

    Args:
        models: sizes of the model and, where there is one, of its guide.
        dense: the backend of dense attention to check; None: none.
        cache_root: where the folder ``dllm`` keeps the results.

    Returns:
        The reason by the operator's name, or ``DENSE``.

    Raises:
        RuntimeError: a check has left the device unusable; the next start knows which.
    """
    key = _key(device, dtype, models, dense)
    file = cache_root / "dllm" / f"kernels-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"
    results = _read(file, key)
    checks = [check for check in _checks(device, dtype, models, dense) if _label(check) not in results]
    if checks:
        logger.info("Checking kernels on %s, once for these versions and sizes", key["processor"])
        replaced = set(plain_on_cuda)
        plain_on_cuda.clear()  # an engine before this one may have replaced what is to be checked
        try:
            _run(checks, results, device)
            torch.cuda.empty_cache()
        finally:
            plain_on_cuda.update(replaced)
            _write(file, key, results)
    return {_operator(label): f"{label}: {reason}" for label, reason in results.items() if reason}


def _run(checks: Sequence[Check], results: dict[str, str], device: torch.device) -> None:
    """Run checks, each when those before have their reason in ``results``."""
    plain_on_cuda.update(_operator(label) for label, reason in results.items() if reason)
    for check, outcome in zip(checks, run_checks(checks), strict=True):
        label, operator = _label(check), _operator(_label(check))
        if "out of memory" in outcome.reason:
            logger.warning("%s could not be checked (%s)", label, outcome.reason)
            continue
        results[label] = _reason(outcome)
        if outcome.result != FAILED:
            continue
        if not _is_usable(device):
            raise RuntimeError(
                f"the kernel of {label} leaves the GPU unusable for this process ({results[label]}). Start again: its "
                "plain version takes its place from now on. Run `dllm check` and report what it says"
            )
        if operator != DENSE:
            plain_on_cuda.add(operator)
            again = next(run_checks([check]))
            if again.result == FAILED:
                results[label] += f"; its plain version on the device: {_reason(again)}"


def _checks(device: torch.device, dtype: torch.dtype, models: Sequence[Sizes], dense: str | None) -> Iterator[Check]:
    """Those of kernels that can be replaced, with the model's sizes, and with its guide's."""
    for sizes, is_guide in zip(models, (False, True), strict=False):
        for each in dict.fromkeys((dtype, torch.float32)):
            for check in operator_checks(device, sizes, (each,), sizes.limited):
                if check.name in _OF_LOGITS or (each == dtype and check.name != "noise"):
                    yield replace(check, case=f"{check.case}, guide") if is_guide else check
    if dense is not None:
        yield dense_check(device, dense, models[0], dtype)


def _label(check: Check) -> str:
    return f"{check.name}, {check.case}"


def _operator(label: str) -> str:
    return label.split(",")[0]


def _reason(outcome: Outcome) -> str:
    """Why a check failed; empty if it did not."""
    if outcome.result != FAILED:
        return ""
    return outcome.reason or f"error {outcome.error:.1e}, bound {outcome.bound:.1e}"


def _is_usable(device: torch.device) -> bool:
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def _key(device: torch.device, dtype: torch.dtype, models: Sequence[Sizes], dense: str | None) -> dict[str, Any]:
    """What results depend on, as JSON gives it back."""
    machine = provenance()
    files = Path(dllm_engine.kernels.__path__[0]).rglob("*")
    sources = sorted(path for path in files if path.suffix in (".py", ".json"))
    kernels = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    versions = {name: machine[name] for name in _VERSIONS} | {"cuda": torch.version.cuda, "kernels": kernels}
    asked = {"dtype": str(dtype), "models": [asdict(sizes) for sizes in models], "dense": dense}
    gpu = {"uuid": str(torch.cuda.get_device_properties(device).uuid)}
    key: dict[str, Any] = json.loads(json.dumps(gpu | versions | asked))
    return key


def _read(file: Path, key: dict[str, Any]) -> dict[str, str]:
    """Reasons by check; none where the file is missing, damaged, or of something else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return dict(content["results"]) if content["key"] == key else {}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _write(file: Path, key: dict[str, Any], results: dict[str, str]) -> None:
    """In one piece: engines may start together."""
    part = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"key": key, "results": results}, indent=1), encoding="utf-8")
        part.replace(file)
    except OSError as error:
        logger.warning("Cannot keep what the check of kernels found, so every start checks them again: %s", error)
