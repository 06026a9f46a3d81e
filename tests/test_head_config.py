"""Settings of a head: the default, the paper's, what contradicts itself, and what earlier versions saved."""

import json
from dataclasses import replace

import pytest

from sot import NORMS, POOLS, Fusion, HeadConfig
from sot.core.head_config import applicable, merge_head
from sot.core.normalizers import SYMMETRIC_ONLY
from sot.probe.names import HEADS


def test_the_default_is_exact_of_exponent_a_quarter():
    config = HeadConfig()
    assert (config.norm, config.exponent, config.fusion) == ("svpn", 0.25, "sum")
    assert (config.heads, config.left_dim, config.right_dim) == (6, 14, 14)


@pytest.mark.parametrize(
    ("settings", "norm", "exponent"),
    [
        ({"norm": "svpn"}, "svpn", 0.5),
        ({"norm": "svpn_fast"}, "svpn_fast", 0.5),
        ({"exponent": 0.5}, "svpn", 0.5),
        ({"exponent": 0.7}, "svpn", 0.7),
        ({"num_values": 2}, "svpn_fast", 0.5),
        ({"num_iterations": 3}, "svpn_fast", 0.5),
        ({"num_iterations": 3, "exponent": 0.3}, "svpn_fast", 0.3),
        ({"pool": "gcp"}, "isqrt", 0.5),
        ({"pool": "gcp", "num_iterations": 3}, "isqrt", 0.5),
        ({"pool": "gcp", "norm": "mpn"}, "mpn", 0.5),
        ({"pool": "gap"}, None, 0.5),
        ({"fusion": "class"}, None, 0.25),
    ],
)
def test_what_is_not_set_is_chosen_once(settings, norm, exponent):
    config = HeadConfig(**settings)
    assert (config.norm, config.exponent) == (norm, exponent)
    assert HeadConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert HeadConfig.from_saved(config.to_dict()) == config


def test_the_papers_head_is_fast_with_one_value_one_iteration_and_one_half():
    config = HeadConfig.paper(dropout=0.5)
    assert config == HeadConfig(norm="svpn_fast", exponent=0.5, num_values=1, dropout=0.5)
    covariance = HeadConfig.paper(pool="gcp")
    assert (covariance.norm, covariance.exponent) == ("isqrt", 0.5)
    assert HeadConfig.paper(norm="svpn", exponent=0.3) == HeadConfig(norm="svpn", exponent=0.3)
    assert HeadConfig.paper(pool="gap") == HeadConfig(pool="gap") and HeadConfig.paper(fusion="class").norm is None


def every_head():
    for pool in POOLS:
        norms = {"mgcrp": set(NORMS) - SYMMETRIC_ONLY, "gcp": NORMS}.get(pool, ())
        for norm in [None, *norms]:
            for fusion in Fusion:
                yield HeadConfig(pool=pool, norm=norm, fusion=fusion)
    yield HeadConfig(representation_size=1000, heads=1)
    yield HeadConfig(pool="gcp", representation_size=1000)
    yield from filter(None, HEADS.values())


def test_a_dictionary_of_all_fields_is_taken_back_and_replace_keeps_the_rest():
    for config in every_head():
        assert HeadConfig.from_dict(config.to_dict()) == config
        assert config.norm is not None or config.pool not in ("mgcrp", "gcp") or config.fusion == "class"
        other = replace(config, pre_norm=True, dropout=0.5)
        assert replace(other, pre_norm=config.pre_norm, dropout=config.dropout) == config == config.changed({})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"representation_size": 1000, "heads": 1, "left_dim": 8}, "size=1000 means left_dim=32, got left_dim=8"),
        (
            {"representation_size": 1000, "right_dim": 14},
            "representation_size=1000 means right_dim=13, got right_dim=14",
        ),
        ({"pool": "gcp", "representation_size": 1176, "reduced_dim": 40}, "means reduced_dim=48, got reduced_dim=40"),
        ({"norm": "svpn", "num_values": 2}, "num_values=2 is for svpn_fast only, got norm 'svpn'"),
        ({"norm": "svpn", "num_iterations": 1}, "num_iterations=1 is for svpn_fast and isqrt only, got norm 'svpn'"),
        ({"pool": "gcp", "num_values": 2}, "num_values=2 is for svpn_fast only, got norm 'isqrt'"),
        ({"pool": "gcp", "exponent": 0.25}, "svpn_matmul, mpn and epn only, got norm 'isqrt'"),
        *(({"norm": norm, "exponent": 0.3}, f"got norm '{norm}'") for norm in ("isqrt", "ln", "scale", "none")),
        ({"pool": "gcp", "heads": 2}, "heads=2 is for mgcrp only, got pool 'gcp'"),
        ({"pool": "gcp", "left_dim": 8}, "left_dim=8 is for mgcrp only, got pool 'gcp'"),
        ({"reduced_dim": 8}, "reduced_dim=8 is for gcp only, got pool 'mgcrp'"),
        ({"num_queries": 8}, "num_queries=8 is for ep only, got pool 'mgcrp'"),
        ({"pool": "gap", "norm": "svpn"}, "norm='svpn' is for mgcrp and gcp only, got pool 'gap'"),
        ({"pool": "gap", "center": True}, "center=True is for mgcrp and gcp only, got pool 'gap'"),
    ],
)
def test_contradictions_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        HeadConfig(**settings)
    with pytest.raises(ValueError, match=message):
        HeadConfig.from_dict({**settings, "dropout": 0.5})


@pytest.mark.parametrize("norm", ["isqrt", "ln", "scale", "none"])
def test_defaults_contradict_nothing(norm):
    assert HeadConfig(pool="gcp", norm=norm, exponent=0.5, num_values=1, left_dim=14, heads=6).norm == norm


@pytest.mark.parametrize(
    ("base", "changes", "merged"),
    [
        (
            {"heads": 1, "representation_size": 1000},
            {"left_dim": 8, "right_dim": 8},
            {"heads": 1, "left_dim": 8, "right_dim": 8},
        ),
        ({"left_dim": 8, "right_dim": 8}, {"representation_size": 1000}, {"representation_size": 1000}),
        ({"pool": "gcp", "reduced_dim": 8}, {"representation_size": 99}, {"pool": "gcp", "representation_size": 99}),
        ({"norm": "svpn", "exponent": 0.25}, {"norm": "svpn_fast"}, {"norm": "svpn_fast"}),
        ({"norm": "svpn_fast", "num_iterations": 3}, {"norm": "ln"}, {"norm": "ln"}),
        ({"norm": "svpn_fast", "exponent": 0.3}, {"exponent": 0.4}, {"norm": "svpn_fast", "exponent": 0.4}),
        ({"norm": "svpn_fast"}, {"pool": "mgcrp"}, {"norm": "svpn_fast", "pool": "mgcrp"}),
        ({"norm": "svpn_fast", "heads": 2, "center": True}, {"pool": "gcp"}, {"pool": "gcp", "center": True}),
        (
            {"representation_size": 1000, "center": True, "dropout": 0.5},
            {"pool": "gap"},
            {"pool": "gap", "dropout": 0.5},
        ),
        ({"norm": "svpn_fast", "dropout": 0.5}, {"norm": None}, {"dropout": 0.5}),
        ({"pool": "gcp", "norm": "mpn", "reduced_dim": 8}, {"pool": None}, {}),
    ],
)
def test_changes_withdraw_what_contradicts_them(base, changes, merged):
    assert merge_head(base, changes) == merged
    resolved = HeadConfig.from_dict(base)
    assert resolved.changed(changes) == HeadConfig.from_dict(merged)


def test_a_pool_of_another_kind_is_named():
    for build in (HeadConfig.from_dict, lambda head: HeadConfig.paper(**head), HeadConfig().changed):
        with pytest.raises(ValueError, match=r"unknown pool \['gap'\]"):
            build({"pool": ["gap"]})


def test_changes_of_one_source_may_not_contradict_each_other():
    with pytest.raises(ValueError, match="representation_size=1000 means left_dim=32, got left_dim=8"):
        HeadConfig(heads=1).changed({"representation_size": 1000, "left_dim": 8})
    with pytest.raises(ValueError, match="num_values=2 is for svpn_fast only, got norm 'svpn'"):
        HeadConfig.from_dict(merge_head({"norm": "svpn_fast"}, {"norm": "svpn", "num_values": 2}))


def test_a_null_norm_that_was_saved_is_the_papers():
    old = {
        "pool": "mgcrp",
        "fusion": "sum",
        "heads": 2,
        "norm": None,
        "exponent": 0.5,
        "num_values": 1,
        "reduced_dim": 48,
    }
    assert HeadConfig.from_saved(old) == HeadConfig.paper(heads=2)
    assert HeadConfig.from_saved({**old, "num_iterations": 3, "exponent": 0.3}) == HeadConfig.paper(
        heads=2, num_iterations=3, exponent=0.3
    )
    assert HeadConfig.from_saved({**old, "pool": "gcp"}) == HeadConfig(pool="gcp", norm="isqrt")
    assert HeadConfig.from_saved({**old, "norm": "svpn", "num_values": 2}) == HeadConfig(heads=2, norm="svpn")
    assert HeadConfig.from_saved({"heads": 2}) == HeadConfig(heads=2), "a norm that is not there is the default"
    with pytest.raises(ValueError, match="unknown head setting 'sides'"):
        HeadConfig.from_saved({**old, "sides": 3})


def test_settings_without_effect_can_be_left_out():
    assert applicable({"pool": "gcp", "left_dim": 8, "exponent": 0.3, "dropout": 0.5}) == {
        "pool": "gcp",
        "dropout": 0.5,
    }
    assert applicable({"exponent": 0.3, "num_iterations": 2}) == {"exponent": 0.3, "num_iterations": 2}
    assert applicable({"fusion": "class", "left_dim": 8}) == {"fusion": "class", "left_dim": 8}
