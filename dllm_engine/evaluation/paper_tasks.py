"""Benchmarks as the papers set them up: lengths, steps and few-shot counts, with the task of lm_eval that asks them.

The settings are the papers', the prompts, stop strings and scoring are lm_eval's; the papers used other harnesses for
some, so that scores need not be theirs. No paper says how it gives few-shot examples to an instructed model; lm_eval's
way is a turn each. Steps are those of the whole response: every row here unmasks one token per step.
"""

from dataclasses import dataclass, replace
from pathlib import PurePath

from dllm_engine.families import DREAM, LLADA, ModelFamily

PAPERS: dict[str, str] = {
    "sparse-dllm": "Sparse-dLLM, arXiv 2508.02558",
    "dllm-cache": "dLLM-Cache, arXiv 2506.06295",
    "freecache": "FreeCache and Guided Diffusion, arXiv 2505.21467",
    "maskkv": "MaskKV, arXiv 2510.09309",
}
"""In the order in which they are asked for a benchmark's settings where none is named."""


@dataclass(frozen=True)
class PaperTask:
    """A benchmark in one paper."""

    paper: str
    benchmark: str
    task: str
    """Of lm_eval: a task or a group of them."""
    steps: int
    block_length: int | None
    """None: the whole response is one block."""
    gen_length: int
    num_fewshot: int | None
    """None: the paper does not say, and lm_eval's own count holds."""
    source: str
    """Where in the paper."""
    base_task: str | None = None
    """The task for models that are not instructed, where it is another."""
    metric: str | None = None
    """Of several the one to report; None: lm_eval's first."""
    max_prompt_tokens: int | None = None
    family: ModelFamily | None = None
    """The only one the row is for; None: both."""
    refresh_intervals: dict[str, tuple[int, int]] | None = None
    """dLLM-Cache's (prompt, response) intervals by checkpoint."""

    def cache_options(self, model: str) -> dict[str, dict[str, int]]:
        """Cache options that the benchmark has for a model, by cache method."""
        for checkpoint, (prompt, response) in (self.refresh_intervals or {}).items():
            if PurePath(model).name == checkpoint:
                return {"dllm_cache": {"prompt_refresh_interval": prompt, "response_refresh_interval": response}}
        return {}


def _sparse_dllm(
    benchmark: str, task: str, length: int, num_fewshot: int, base_task: str | None = None, metric: str | None = None
) -> PaperTask:
    source = "Table 5, shots from Appendix B"
    return PaperTask("sparse-dllm", benchmark, task, length, 32, length, num_fewshot, source, base_task, metric)


_LLADA_INSTRUCT, _DREAM_INSTRUCT = "LLaDA-8B-Instruct", "Dream-v0-Instruct-7B"


def _dllm_cache(
    benchmark: str,
    task: str,
    length: int,
    block_length: int,
    num_fewshot: int,
    llada: tuple[int, int],
    dream: tuple[int, int],
    metric: str | None = None,
) -> PaperTask:
    return PaperTask(
        "dllm-cache", benchmark, task, length, block_length, length, num_fewshot,
        "Table 10, intervals from Tables 12 and 14", metric=metric,
        refresh_intervals={_LLADA_INSTRUCT: llada, _DREAM_INSTRUCT: dream},
    )  # fmt: skip


def _freecache(benchmark: str, task: str, num_fewshot: int | None, metric: str | None = None) -> list[PaperTask]:
    row = PaperTask("freecache", benchmark, task, 256, 64, 256, num_fewshot, "Tables 3 and 10", metric=metric)
    return [replace(row, family=LLADA), replace(row, family=DREAM, block_length=None)]


def _maskkv(task: str, length: int) -> PaperTask:
    return PaperTask("maskkv", f"longbench_{task}", f"longbench_{task}", length, 8, length, 0, "A.2 and Table 6")


_FLEXIBLE = "exact_match,flexible-extract"
"""The last number, or choice, of a response; the strict match wants the form of lm_eval's few-shot examples."""

PAPER_TASKS: tuple[PaperTask, ...] = (
    _sparse_dllm("mmlu", "mmlu_generative", 256, 5),
    _sparse_dllm("arc_challenge", "arc_challenge_chat", 256, 0),
    _sparse_dllm("gpqa", "gpqa_main_generative_n_shot", 256, 5, metric=_FLEXIBLE),
    _sparse_dllm("gsm8k", "gsm8k", 256, 4, metric=_FLEXIBLE),
    _sparse_dllm("math", "minerva_math", 256, 4),
    _sparse_dllm("humaneval", "humaneval_instruct", 512, 0, base_task="humaneval"),
    PaperTask("sparse-dllm", "longbench", "longbench", 512, 32, 512, 0, "Appendix C, Table 7", max_prompt_tokens=4096),
    _dllm_cache("gsm8k", "gsm8k", 256, 8, 4, llada=(50, 7), dream=(25, 2), metric=_FLEXIBLE),
    _dllm_cache("gpqa", "gpqa_main_generative_n_shot", 128, 64, 5, llada=(50, 6), dream=(10, 8), metric=_FLEXIBLE),
    _dllm_cache("math", "minerva_math", 256, 256, 0, llada=(50, 1), dream=(50, 1)),
    _dllm_cache("mmlu_pro", "mmlu_pro", 256, 256, 0, llada=(51, 3), dream=(5, 1)),
    _dllm_cache("mmlu", "mmlu_generative", 3, 3, 5, llada=(100, 7), dream=(100, 8)),
    _dllm_cache("bbh", "bbh_cot_fewshot", 256, 256, 3, llada=(100, 5), dream=(10, 2)),
    _dllm_cache("mbpp", "mbpp_instruct", 512, 32, 3, llada=(100, 5), dream=(10, 8)),
    _dllm_cache("humaneval", "humaneval_instruct", 512, 32, 0, llada=(25, 5), dream=(50, 1)),
    *_freecache("gsm8k", "gsm8k", 8, metric=_FLEXIBLE),
    *_freecache("mmlu_pro", "mmlu_pro", None),
    *_freecache("arc_challenge", "arc_challenge_chat", None),
    *_freecache("gpqa", "gpqa_main_generative_n_shot", None, metric=_FLEXIBLE),
    *(_maskkv(task, 128) for task in ("narrativeqa", "qasper", "samsum")),
    *(_maskkv(task, 64) for task in ("multifieldqa_en", "trec", "lcc", "repobench-p")),
    *(
        _maskkv(task, 32)
        for task in ("hotpotqa", "2wikimqa", "musique", "triviaqa", "passage_count", "passage_retrieval_en")
    ),
    *(_maskkv(task, 512) for task in ("gov_report", "qmsum", "multi_news")),
)


def paper_task(benchmark: str, family: ModelFamily, paper: str | None = None) -> PaperTask:
    """The row of a benchmark, of the first paper that has it unless one is named; raises ``ValueError``."""
    if paper is not None and paper not in PAPERS:
        raise ValueError(f"paper {paper!r} is unknown; choose one of {', '.join(PAPERS)}")
    of_paper = [row for row in PAPER_TASKS if paper in (None, row.paper) and row.family in (None, family)]
    for name in PAPERS:
        for row in of_paper:
            if (row.paper, row.benchmark) == (name, benchmark):
                return row
    where = f"paper {paper} has" if paper is not None else "the papers have"
    known = ", ".join(dict.fromkeys(row.benchmark for row in of_paper))
    raise ValueError(f"benchmark {benchmark!r} is unknown; {where} {known}")
