"""What was saved by some workers is loaded by others, or refused."""

import itertools
import weakref
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from trnslurm.train.checkpoint import reading
from trnslurm.train.checkpoint.pretrained import load_parameters
from trnslurm.train.checkpoint.tensors import open_rows
from trnslurm.train.errors import TrainError
from trnslurm.train.export.folder import _parameter_files

from .conftest import Model, Team


@pytest.mark.parametrize("readers", [1, 2, 3, 8])
@pytest.mark.parametrize("writers", [1, 4, 8])
def test_any_number_of_workers_reads_what_any_number_wrote(team, writers, readers):
    team(writers).save(17)

    again = team(readers, attempt=2)
    assert again.resume() == 17
    assert again.holds(17)
    assert not again.holds(16)
    for optimizer in again.optimizers:
        assert [state["step"] for state in optimizer._base.state.values()] == [17] * 4


def test_any_rows_can_be_read_alone(team):
    writers = team(4)
    writers.save(1)
    read = open_rows(writers.root / "step-00000001", writers.checkpoints[0].newest())
    whole = writers.value("linear.weight", "exp_avg", 1)

    for start, stop in itertools.combinations_with_replacement(range(12), 2):
        rows = read("linear.weight", "exp_avg", range(start, stop))
        assert torch.equal(rows, whole[start:stop]), (start, stop)


def test_of_a_bf16_model_the_optimizers_fp32_copy_is_kept(team):
    team(2, dtype=torch.bfloat16).save(1)

    same, fp32 = team(3, dtype=torch.bfloat16), team(1)
    assert same.resume() == fp32.resume() == 1
    assert same.holds(1)
    assert fp32.holds(1)
    assert same.models[0].linear.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("precision", ["fp32_state", "as_model"])
def test_without_a_copy_bf16_parameters_are_kept(team, precision):
    writers = team(2, dtype=torch.bfloat16, precision=precision)
    writers.save(1)
    types = {tensor.dtype for tensor in load_file(writers.file(1)).values()}
    assert types == {torch.bfloat16} | ({torch.float32} if precision == "fp32_state" else set())

    same = team(3, dtype=torch.bfloat16, precision=precision)
    assert same.resume() == 1
    assert same.holds(1)
    # Another precision takes what there is.
    copies = team(3, dtype=torch.bfloat16)
    assert copies.resume() == 1
    assert {holder.dtype for *_, holder in copies.optimizers[0]._triples()} == {torch.float32}
    assert torch.equal(copies.models[0].linear.weight, same.models[0].linear.weight)


def test_a_minimal_checkpoint_begins_the_moments_anew(team, capsys):
    writers = team(2, save_optimizer=False)
    writers.save(7)
    assert all(key.startswith("parameter/") for key in load_file(writers.file(7)))

    again = team(3)
    capsys.readouterr()
    assert again.resume() == 7
    assert (
        "note: the checkpoint has no optimizer state, so the moments start at zero"
        in capsys.readouterr().out
    )
    [optimizer, *_] = again.optimizers
    for name, parameter, holder in optimizer._triples():
        assert torch.equal(parameter, writers.value(name, "parameter", 7))
        assert all(not value.any() for value in optimizer._base.state[holder].values())


def test_a_manifest_says_what_it_is(team):
    writers = team(2, facts={"data": "abc"})
    [saved, _] = writers.save(3)

    manifest = writers.checkpoints[0].newest()
    assert (manifest.step, manifest.samples, manifest.attempt, manifest.workers) == (3, 144, 1, 2)
    assert manifest.facts["data"] == "abc"
    assert manifest.facts["global_batch"] == 48
    assert saved.num_bytes == sum(writers.file(3, r).stat().st_size for r in range(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"facts": {"data": "b"}}, "data was 'a', is 'b'"),
        ({"width": 6}, r"embed.weight was \[7, 5\], is \[7, 6\]"),
        ({"optimizer": "sgd"}, r"optimizer was \['parameter', 'exp_avg', 'exp_avg_sq'\], is"),
    ],
)
def test_the_checkpoint_of_another_training_is_refused(team, change, message):
    team(facts={"data": "a"}).save(1)

    with pytest.raises(TrainError, match=message):
        team(**({"facts": {"data": "a"}} | change)).resume()


def test_another_batch_is_refused_and_other_settings_are_noted(team, capsys):
    team().save(1)

    with pytest.raises(TrainError, match="micro_batch was 2, is 1"):
        team(plan={"micro_batch": 1}).resume()
    capsys.readouterr()
    assert team(plan={"steps": 99}).resume() == 1
    assert "note: steps was 10, is 99" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_parameters_are_saved_in_their_type_and_read_back(team, dtype):
    frozen = ("embed.weight", "scale")
    writers = team(4, dtype=dtype, frozen=frozen)
    writers.save(5)

    saved = load_file(writers.file(5, rank=0))
    assert {key for key in saved if key.endswith(frozen)} == {f"parameter/{one}" for one in frozen}
    assert saved["parameter/embed.weight"].dtype == dtype
    # Each new model has values of its own.
    again = team(3, dtype=dtype, frozen=frozen)
    assert again.resume() == 5
    assert again.holds(5)
    assert again.models[0].head.weight is again.models[0].embed.weight
    assert all(model.scale.grad is None for model in again.models)


@pytest.mark.parametrize("options", [{}, {"optimizer": "sgd"}, {"save_optimizer": False}])
def test_frozen_in_the_middle_it_continues_and_back_only_without_moments(team, options, capsys):
    team(2, **options).save(3)
    frozen = team(3, frozen=["embed.weight"], **options)
    capsys.readouterr()
    assert frozen.resume() == 3
    weight = frozen.models[2].embed.weight
    assert torch.equal(weight, frozen.value("embed.weight", "parameter", 3))
    assert "note: now frozen: embed.weight" in capsys.readouterr().out
    frozen.save(4)

    thawed = team(2, **options)
    if options:
        assert thawed.resume() == 4
        assert "note: now trained again: embed.weight" in capsys.readouterr().out
    else:
        with pytest.raises(
            TrainError, match=r"step-00000004 has no optimizer state for embed\.weight"
        ):
            thawed.resume()


def test_nothing_to_train_and_frozen_too_late_are_refused(team):
    with pytest.raises(TrainError, match="every parameter of the model is frozen"):
        team(frozen=[name for name in Team.names if name != "seen"])
    late = team(1)
    late.models[0].linear.requires_grad_(False)
    with pytest.raises(
        TrainError, match=r"^linear\.weight, linear\.bias: requires_grad was changed"
    ):
        late.optimizers[0].begin()


def test_an_export_has_what_is_frozen_and_buffers_or_names_what_it_lacks(team, tmp_path):
    writers = team(3, frozen=["embed.weight"])
    writers.save(2)
    manifest = writers.checkpoints[0].newest()

    def load(manifest, dtype):
        with torch.device("meta"):
            model = Model(5).to(dtype)
        model.save_pretrained = lambda folder, state_dict: None
        checkpoint = writers.root / "step-00000002"
        _parameter_files(model, checkpoint, manifest, "parameter")(tmp_path)
        return load_file(tmp_path / "model.safetensors")

    exported = load(manifest, torch.bfloat16)
    weight = writers.value("embed.weight", "parameter", 2)
    assert torch.equal(exported["embed.weight"], weight.bfloat16())
    assert (exported["seen"], exported["seen"].dtype) == (2, torch.int64)
    other = Model(5)
    load_parameters(other, str(writers.root / "step-00000002"))
    assert torch.equal(other.embed.weight, weight) and other.seen == 2
    for name in ("embed.weight", "seen"):
        shapes = {each: shape for each, shape in manifest.shapes.items() if each != name}
        with pytest.raises(TrainError, match=f"has no {name}: train.py must pass make_optimizer"):
            load(replace(manifest, shapes=shapes), torch.float32)


def test_first_parameters_are_read_once_and_one_at_a_time(team, monkeypatch):
    writers = team(3)
    writers.save(2)
    reader, read = reading.parameter_reader, {}

    def reader_that_tells(*words):
        read_one = reader(*words)

        def tell(name):
            assert name not in read and not any(one() is not None for one in read.values())
            tensor = read_one(name)
            read[name] = weakref.ref(tensor)
            return tensor

        return tell

    monkeypatch.setattr(reading, "parameter_reader", reader_that_tells)
    load_parameters(Model(5), str(writers.root / "step-00000002"))
    assert read.keys() == set(writers.names)
