"""The demo model is trained on questions as an engine asks them, and answers them."""

from itertools import zip_longest

import pytest

from dllm_engine import Questions
from dllm_engine.constraints.decision import unpacked_decision
from dllm_engine.demo.questions import QUESTION_KINDS, ask
from dllm_engine.evaluation.labelled_questions import QuestionTask
from dllm_engine.evaluation.own_tasks import QUESTIONS, named_task
from dllm_engine.request_options.sampling_params import DECISION
from scripts.train_demo.samples import EOS, prompt_and_pieces

SEED = 100
"""Far below the training seeds."""
LEAST_RIGHT = {"who": 0.9, "count": 0.6}


@pytest.mark.parametrize("together", [1, 3])
def test_it_is_trained_on_what_an_engine_asks(demo, together):
    spelling = demo.asking.spelling
    for text in ask(SEED, 20, together=together):
        questions = Questions([each.question for each in text.asked]).read
        messages = [{"role": "user", "content": text.text}]
        (row,) = demo.asking.rows(messages, questions, True)
        prompt, pieces = prompt_and_pieces(text)
        assert row.messages == [{"role": "user", "content": prompt}]
        decision = unpacked_decision(row.params.extra_args[DECISION])
        tokens = spelling.tokens([piece for piece, _ in pieces])
        shown = [
            (token, is_answer)
            for own, (_, is_answer) in zip(tokens, pieces, strict=True)
            for token in own
        ]
        response = [*shown, (EOS, False)]
        for given, (token, is_answer) in zip_longest(decision.template, response):
            assert given == token or (given is None and is_answer)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("kind", QUESTION_KINDS)
def test_it_answers_right(demo, kind, joint):
    texts = ask(SEED, 40, [kind], together=1 + joint)
    right = []
    for text in texts:
        questions = Questions([each.question for each in text.asked], joint)
        (answers,) = demo.decide(text.text, questions)
        for answer, each in zip(answers, text.asked, strict=True):
            right.append(answer.value == each.answer)
    assert sum(right) >= LEAST_RIGHT.get(kind, 0.95) * len(right)


def test_it_wants_to_say_no_more_than_yes_or_no(demo):
    (text,) = ask(SEED, 1, ["anyone"])
    questions = Questions([text.asked[0].question])
    ((answer,),) = demo.decide(text.text, questions)
    assert answer.label_mass > 0.95


def test_its_questions_are_tasks_of_their_own():
    for name, kind in QUESTIONS.items():
        task = named_task(name, 3, SEED, "exact")
        assert isinstance(task, QuestionTask)
        assert [each.answer for each in task.questions] == [
            text.asked[0].option for text in ask(SEED, 3, [kind])
        ]
