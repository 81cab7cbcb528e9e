"""Published models by name: sizes, weights, tokenizer and data of another model in one word."""

from __future__ import annotations

import pytest

from trnslurm.config.load import resolve
from trnslurm.config.models import PUBLISHED
from trnslurm.config.schema import Config
from trnslurm.config.search import Workspace, packaged_root
from trnslurm.errors import ConfigError
from trnslurm.plan.memory import estimate_memory, shape_of
from trnslurm.plan.spec import make_spec
from trnslurm.plan.values import declarations

WORKSPACE = Workspace(roots=(packaged_root(),), cluster=None, cluster_source="")


def named(recipe: str, name: str, *settings: str, preset: str | None = None) -> Config:
    words = [*settings, f"model.name={name}"]
    return resolve(WORKSPACE, recipe, cluster="trn1", preset=preset, settings=words)


# What transformers counts in AutoModelForSequenceClassification and …ForTokenClassification.
@pytest.mark.parametrize(
    ("recipe", "name", "parameters"),
    [
        ("bert_mrpc", "bert-base-uncased", 109_483_778), ("bert_mrpc", "roberta-base", 124_647_170),
        ("bert_mrpc", "roberta-large", 355_361_794), ("bert_mrpc", "albert-base-v2", 11_685_122),
        ("bert_mrpc", "distilbert-base-uncased", 66_955_010),
        ("bert_mrpc", "albert-xxlarge-v2", 222_603_778), ("bert_ner", "", 107_726_601),
        ("bert_ner", "roberta-base", 124_061_961), ("bert_ner", "albert-base-v2", 11_099_913),
        ("bert_ner", "distilbert-base-cased", 65_197_833),
        ("bert_pretrain", "bert-base-uncased", 110_106_428),
    ],
)  # fmt: skip
def test_a_name_brings_the_published_sizes(recipe: str, name: str, parameters: int) -> None:
    config = named(recipe, name)
    shape = shape_of(config.recipe.model, of_words=recipe == "bert_ner")
    assert shape is not None and shape.parameters == parameters


def test_a_job_declares_the_same_names() -> None:
    berts = [name for name, (_, values) in PUBLISHED.items() if values["model_type"] == "bert"]
    for recipe, names in (("bert_ner", [*PUBLISHED]), ("bert_pretrain", berts)):
        declared = declarations(named(recipe, ""))["model"]
        assert declared.fields["name"].choices == ("", *names)


def test_it_brings_weights_tokenizer_and_data_of_its_own() -> None:
    for name, (owner, _) in PUBLISHED.items():
        data = named("bert_mrpc", name, preset="rte").recipe.data
        assert (data.model, data.tokenizer) == (f"{owner}/{name}", f"{owner}/{name}")
        assert data.path == f"glue-rte-seqlen128-{name}"
    own = named("bert_sentiment", "", preset="tweets").recipe.data
    assert (own.model, own.path) == ("google-bert/bert-base-cased", "tweets-seqlen128")


def test_the_command_line_stands_above_it_and_a_preset_below() -> None:
    config = named("bert_ner", "albert-base-v2", "model.num_hidden_layers=3", "data.path=mine")
    assert config.recipe.model["num_hidden_layers"] == 3 and config.recipe.data.path == "mine"
    assert config.origins["model.hidden_act"].source == "model.name albert-base-v2"
    small = named("bert_sentiment", "roberta-base", preset="tiny")
    assert small.recipe.model["hidden_size"] == 768
    # What a preset makes by itself stays its own: new parameters, a tokenizer of its text.
    assert (small.recipe.data.model, small.recipe.data.tokenizer) == (None, "train:512")
    assert small.recipe.data.path == "tweets-tiny-seqlen32"


def test_a_pretraining_has_the_sizes_and_no_weights() -> None:
    config = named("bert_pretrain", "bert-base-uncased")
    assert config.recipe.model["hidden_size"] == 768 and "model_type" not in config.recipe.model
    assert (config.recipe.data.model, config.recipe.data.tokenizer) == (None, "train:30522")


@pytest.mark.parametrize(
    ("recipe", "name", "words"),
    [
        ("bert_mrpc", "robert-base", 'not a known published model (did you mean "rob'),
        ("bert_mrpc", "x", "model; known are bert-base-uncased, "),
        ("bert_pretrain", "roberta-base", "a roberta model: this recipe trains bert-base-un"),
    ],
)
def test_a_name_that_is_not_known_is_refused(recipe: str, name: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        named(recipe, name)
    assert words in str(error.value)


def test_a_recipe_may_mean_something_else_by_it(site, cli) -> None:
    site.recipe("steps: 1\nbatch: {global_batch: 1}\nmodel: {name: mine, hidden_size: 8}\n")
    assert "mine" in cli("show", "toy", "--cluster", "pc").out


def test_missing_data_are_asked_for_by_the_same_name(site, cli, home) -> None:
    end = "--preset mrpc --cluster local --set model.name=roberta-base"
    job = ("bert_mrpc", *end.split())
    assert cli("submit", *job, "--dry-run").error.endswith(f"data prepare bert_mrpc {end}")
    assert cli("data", "prepare", *job).error.endswith(f"data fetch bert_mrpc {end}")


def test_layers_that_share_parameters_keep_activations_each() -> None:
    def memory(name: str):
        found = estimate_memory(make_spec(named("bert_mrpc", name), 1, need_time=False))
        assert found is not None
        return found

    albert, bert = memory("albert-base-v2"), memory("bert-base-uncased")
    assert albert.state < bert.state / 9
    assert albert.activations == pytest.approx(bert.activations)
