"""Reads a checkpoint's safetensors files, ahead of what is copied from them."""

import mmap
import time
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tqdm import tqdm
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import is_global_first_rank
from vllm.model_executor.model_loader import DefaultModelLoader, get_model_loader

from dllm_engine.model_executor.models.decoder import DiffusionDecoder
from dllm_engine.quiet import progress_line

Tensors = Generator[tuple[str, torch.Tensor]]
_OUR_FORMATS = ("auto", "hf", "safetensors")
_BAR_DELAY_SECONDS = 1
_BYTES_AHEAD = 256 << 20
"""Read before the caller wants them, and a tensor more."""


def load_decoder(vllm_config: VllmConfig) -> DiffusionDecoder:
    """The engine's model with its weights, as vLLM's ``get_model`` makes it."""
    loader: Any = get_model_loader(vllm_config.load_config)
    if type(loader) is DefaultModelLoader and vllm_config.load_config.load_format in _OUR_FORMATS:
        loader = CheckpointLoader(vllm_config.load_config)
    model = loader.load_model(vllm_config=vllm_config, model_config=vllm_config.model_config)
    assert isinstance(model, DiffusionDecoder)
    return model


class CheckpointLoader(DefaultModelLoader):
    """Holds a few tensors of the files in memory, where vLLM's holds a file, and reads on while they are copied.

    Settings of vLLM that choose another way to read leave it to vLLM's.
    """

    def _get_weights_iterator(self, source: DefaultModelLoader.Source) -> Tensors:
        config = self.load_config
        chosen = config.safetensors_load_strategy or config.model_loader_extra_config or self.local_expert_ids
        shown = config.use_tqdm_on_load and is_global_first_rank()
        model = source.model_or_path
        # vLLM shows no bar while it downloads.
        with progress_line(f"Fetching {model} from Hugging Face", shown=shown and not Path(model).is_dir()):
            _, files, is_safetensors, _ = self._prepare_weights(
                model,
                source.subfolder,
                source.revision,
                source.fall_back_to_pt,
                source.allow_patterns_overrides,
            )
        if chosen or not is_safetensors:
            weights: Tensors = super()._get_weights_iterator(source)
            return weights
        self.counter_before_loading_weights = time.perf_counter()  # for vLLM's message after loading
        return with_progress(files, shown=shown)


def with_progress(files: list[str], *, shown: bool) -> Tensors:
    """The tensors of safetensors ``files``, with a bar of their bytes; none for what is loaded in a second."""
    paths = [Path(file) for file in sorted(files)]
    total = sum(path.stat().st_size - _header_bytes(path) for path in paths)
    # None: shown on a terminal.
    bar_of = {"unit": "B", "unit_scale": True, "delay": _BAR_DELAY_SECONDS, "disable": None if shown else True}
    reader = read_ahead(mapped_tensors(paths))
    with closing(reader), tqdm(total=total, desc="Loading weights", **bar_of) as bar:

        def count(item: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
            bar.update(item[1].nbytes)
            return item

        yield from map(count, reader)  # no name here keeps a tensor in memory


def _header_bytes(path: Path) -> int:
    """A safetensors file's size before its tensors; its first 8 bytes tell the size of what follows them there."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def mapped_tensors(paths: list[Path]) -> Tensors:
    """The tensors of safetensors files, in the order in which they lie there.

    A file is opened again for each: its memory map lives as long as a tensor of it, and all pages that were read
    through it count as this process's memory.
    """
    for path in paths:
        with safe_open(path, framework="pt") as file:
            names = file.offset_keys()
        for name in names:
            yield name, _mapped_tensor(path, name)


def _mapped_tensor(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor


def read_ahead(tensors: Tensors) -> Tensors:
    """The same tensors; a thread has the disk read the next ones while the caller works on one."""
    ahead: deque[tuple[tuple[str, torch.Tensor], Future[None]]] = deque()
    num_bytes = 0

    def oldest() -> tuple[str, torch.Tensor]:
        nonlocal num_bytes
        item, read = ahead.popleft()
        read.result()
        num_bytes -= item[1].nbytes
        return item

    reader = ThreadPoolExecutor(1, thread_name_prefix="CheckpointReader")
    try:
        for item in tensors:
            ahead.append((item, reader.submit(_touch, item[1])))
            num_bytes += item[1].nbytes
            del item
            while num_bytes > _BYTES_AHEAD:
                yield oldest()
        while ahead:
            yield oldest()
    finally:
        reader.shutdown(cancel_futures=True)


def _touch(tensor: torch.Tensor) -> None:
    """Have the system read a tensor that is mapped from a file."""
    tensor.reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()
