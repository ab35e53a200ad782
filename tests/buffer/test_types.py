"""Samples and their spans: which version wrote which token, kept in step by appending, through file,
journal and hook."""

import dataclasses

import pytest

from slime_cli.buffer.batch_files import read_parquet, to_parquet
from slime_cli.buffer.columns import TrainBatch
from slime_cli.buffer.journal import Journal
from slime_cli.buffer.records import encode, payload_of, samples_of
from slime_cli.buffer.types import Group, PromptRow, Sample, Span, Status
from slime_cli.hooks import kinds


def turns() -> Sample:
    """A call of a tool between two of the engine's turns, the second by newer weights in its middle."""
    sample = Sample(index=3, group_index=1, prompt="p", tokens=[7, 8])
    sample.append([1, 2], log_probs=[-0.5, -0.25], version="v000004", trained=True, text="ab")
    sample.append([3], log_probs=None, version=None, trained=False, text="T")
    sample.append([4], log_probs=[-1.0], version="v000004", trained=True, text="c")
    sample.append([5], log_probs=[-2.0], version="v000005", trained=True, text="d")
    sample.append([6], log_probs=[-3.0], version="v000005", trained=True, text="e")
    sample.status = Status.COMPLETED
    sample.reward = 1.0
    return sample


def test_what_is_appended_keeps_every_list_in_step():
    sample = turns()
    sample.check(rows=9)
    assert sample.tokens == [7, 8, 1, 2, 3, 4, 5, 6] and sample.response == "abTcde" and sample.response_length == 6
    assert sample.rollout_log_probs == [-0.5, -0.25, 0.0, -1.0, -2.0, -3.0]
    assert sample.loss_mask == [1, 1, 0, 1, 1, 1]
    assert sample.spans == [Span(2, "v000004"), Span(1, None), Span(1, "v000004"), Span(2, "v000005")]
    assert sample.oldest_step == 4


def test_appending_leaves_a_copy_alone_and_no_token_no_span():
    first = turns()
    second = dataclasses.replace(first)
    second.append([], log_probs=[], version="v000009", trained=True, text="!")
    second.append([1], log_probs=[-1.0], version="v000005", trained=True)
    first.check()
    second.check()
    assert first.response_length == 6 and second.spans[-1] == Span(3, "v000005") and second.response == "abTcde!"


def test_what_was_not_known_of_the_beginning_is_not_known_of_the_whole():
    sample = Sample(0, 0, tokens=[1, 2, 3], response_length=2)
    sample.append([4], log_probs=[-1.0], version="v000005", trained=True)
    sample.check()
    assert sample.spans == [] and sample.loss_mask == [1, 1, 1] and sample.oldest_step is None


def test_tokens_to_train_need_log_probabilities_of_their_number():
    sample = turns()
    with pytest.raises(ValueError, match="2 tokens to train come without log-probabilities"):
        sample.append([1, 2], log_probs=None, version=None, trained=True)
    with pytest.raises(ValueError, match="1 log-probabilities for 2 tokens"):
        sample.append([1, 2], log_probs=[-1.0], version="v000005", trained=True)
    assert sample == turns()


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([Span(5, "v000001")], "spans cover 5 tokens of 6"),
        ([Span(7, None)], "spans cover 7 tokens of 6"),
        ([Span(6, "v000001"), Span(0, None)], "no Span of a length and a version"),
        ([Span(6.0, "v000001")], "no Span of a length and a version"),
        ([Span(6, 1)], "no Span of a length and a version"),
        ([(6, "v000001")], "no Span of a length and a version"),
    ],
)
def test_spans_that_do_not_fit_are_refused(spans, said):
    with pytest.raises(ValueError, match=f"sample 3: spans .*{said.removeprefix('spans ')}"):
        dataclasses.replace(turns(), spans=spans).check()


def test_spans_come_back_from_a_file_a_payload_and_a_dict(tmp_path):
    samples = [turns(), Sample(4, 1, prompt="p", tokens=[1], reward=0.0)]
    (tmp_path / "samples.parquet").write_bytes(to_parquet(samples))
    assert read_parquet(tmp_path / "samples.parquet") == samples
    assert samples_of(payload_of([turns()])) == [turns()] == [Sample.from_dict(turns().to_dict())]
    assert all(type(span) is Span for span in samples_of(payload_of([turns()]))[0].spans)


def test_what_was_written_before_there_were_spans_is_read(tmp_path):
    import pyarrow.parquet as pq

    old = {name: value for name, value in turns().to_dict().items() if name != "spans"}
    path = tmp_path / "samples.parquet"
    path.write_bytes(to_parquet([turns()]))
    pq.write_table(pq.read_table(path).drop_columns("spans"), path)
    unknown = dataclasses.replace(turns(), spans=[])
    assert samples_of(encode(old)) == read_parquet(path) == [unknown]


def test_the_journal_keeps_them_over_a_kill(tmp_path):
    with Journal(tmp_path / "journal.sqlite") as journal:
        journal.lease([(1, PromptRow("p", None, {}, "f", 1), 0, [3])], {}, 0)
        journal.release([turns()])
    with Journal(tmp_path / "journal.sqlite") as journal:
        (group,) = journal.recover().groups
    assert group.partial == {3: [turns()]}


def test_a_users_function_may_leave_spans_as_pairs():
    leased = Sample(index=3, group_index=1)
    sample = dataclasses.replace(turns(), spans=[[4, "v000004"], (2, None)])
    (made,) = kinds.siblings("f", leased, sample)
    assert made.spans == [Span(4, "v000004"), Span(2, None)]
    made.check()


def test_a_batch_has_the_step_of_each_response_token():
    by_calls = Sample(5, 2, tokens=[1, 2, 3], response_length=2, rollout_log_probs=[-1.0, -1.0], reward=0.0)
    samples = [
        turns(),
        dataclasses.replace(by_calls, weight_versions=["v000007", "v000007"]),
        dataclasses.replace(by_calls, weight_versions=["v000007", "v000008"]),
        dataclasses.replace(by_calls, spans=[Span(2, "default")]),
    ]
    versions_R = TrainBatch.from_samples(samples).versions_R
    assert versions_R.dtype == "int32" and versions_R.tolist() == [4, 4, -1, 4, 5, 5, 7, 7, -1, -1, -1, -1]
    assert [s.oldest_step for s in samples] == [4, 7, 7, None]


def test_examples_that_no_engine_wrote_have_no_versions():
    example = Sample(5, 2, tokens=[1, 2, 3], response_length=2)
    assert TrainBatch.from_samples([example]).versions_R is None


def test_a_group_is_as_old_as_its_oldest_token():
    row = PromptRow("p", None, {}, "f", 1)
    partial = Sample(9, 1, tokens=[1])
    partial.append([2], log_probs=[-1.0], version="v000002", trained=True)
    group = Group(1, row, None, finished=[turns()], pending=[Sample(8, 1), partial])
    assert group.oldest_step == 2
    fanned_out = Group(1, row, None, [], [Sample(9, 1)], {9: [turns(), partial]})
    assert fanned_out.oldest_step == 2 and fanned_out.samples == [turns(), partial]
    assert Group(1, row, None, [], [Sample(8, 1)]).oldest_step is None
