"""Reads a checkpoint's safetensors files, ahead of what is copied from them."""

import mmap
import threading
import time
from collections import deque
from collections.abc import Iterator
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

Tensors = Iterator[tuple[str, torch.Tensor]]
_OUR_FORMATS = ("auto", "hf", "safetensors")
_BAR_DELAY_SECONDS = 1
_BYTES_AHEAD = 256 << 20
"""Read before the caller wants them; a larger tensor is read when there is no other."""


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
        _, files, is_safetensors, _ = self._prepare_weights(
            source.model_or_path,
            source.subfolder,
            source.revision,
            source.fall_back_to_pt,
            source.allow_patterns_overrides,
        )
        if chosen or not is_safetensors:
            weights: Tensors = super()._get_weights_iterator(source)
            return weights
        self.counter_before_loading_weights = time.perf_counter()  # for vLLM's message after loading
        return with_progress(files, shown=config.use_tqdm_on_load and is_global_first_rank())


def with_progress(files: list[str], *, shown: bool) -> Tensors:
    """The tensors of safetensors ``files``, with a bar of their bytes; none for what is loaded in a second."""
    paths = [Path(file) for file in sorted(files)]
    total = sum(path.stat().st_size for path in paths)
    bar_of = {"unit": "B", "unit_scale": True, "delay": _BAR_DELAY_SECONDS, "disable": not shown}
    reader = ReadAhead(mapped_tensors(paths))
    with closing(reader), tqdm(total=total, desc="Loading weights", **bar_of) as bar:

        def count(item: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
            bar.update(item[1].nbytes)
            return item

        yield from map(count, reader)  # no name here keeps a tensor in memory


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


class ReadAhead(Iterator[tuple[str, torch.Tensor]]):
    """The same tensors; a thread has the disk read the next ones while the caller works on one.

    Raises what ``tensors`` raises.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._ready: deque[tuple[str, torch.Tensor]] = deque()
        self._bytes_ahead = 0
        self._end: BaseException | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._read, name="CheckpointReader", daemon=True).start()

    def __next__(self) -> tuple[str, torch.Tensor]:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._end is not None)
            if not self._ready:
                assert self._end is not None
                raise self._end
            item = self._ready.popleft()
            self._bytes_ahead -= item[1].nbytes
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _read(self) -> None:
        end: BaseException = StopIteration()
        try:
            for item in self._tensors:
                if not self._has_room(item[1].nbytes):
                    return
                _touch(item[1])
                with self._changed:
                    self._ready.append(item)
                    self._changed.notify_all()
                del item
        except BaseException as error:
            end = error
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def _has_room(self, size: int) -> bool:
        """Wait until ``size`` bytes may be read; False: nobody wants them any more."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or not self._bytes_ahead or self._bytes_ahead + size <= _BYTES_AHEAD
            )
            self._bytes_ahead += size
            return not self._is_closed


def _touch(tensor: torch.Tensor) -> None:
    """Have the system read a tensor that is mapped from a file."""
    tensor.reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()
