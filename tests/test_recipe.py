"""Recipes: the paper's tables, settings from the command line, and what is refused."""

import pytest
import yaml

from sot.cli.options import parse_head
from sot.core.head import HeadConfig
from sot.training.recipe import Recipe, load_recipe, parse_setting, recipe_names
from sot.training.search import settle

# tables S-2 and S-3, typed from the paper
IMAGE = {  # batch size, base LR, weight decay, MGCrP dropout, (m, n)
    "sot_7": (1024, 1e-3, 0.03, 0.0, 14),
    "sot_tiny": (1024, 1e-3, 0.03, 0.0, 14),
    "sot_small": (1024, 1e-3, 0.03, 0.5, 24),
    "sot_base": (512, 5e-4, 0.065, 0.7, 38),
}
TEXT = {  # batch sizes, β₂, ε, epochs, base LRs, weight decay, representation sizes, dropouts
    "gpt": ([32, 64], 0.999, 1e-8, [10, 15], [6.25e-5], 0.01, [4000, 6000], [0.5, 0.7]),
    "bert": ([24, 64, 96], 0.999, 1e-8, [10], [2e-5, 3e-5], 0.0, [1000, 4000, 5000], [0.5, 0.8]),
    "spanbert": ([32], 0.999, 1e-6, [10, 30], [2e-5], 0.01, [1000, 4000, 5000], [0.5, 0.7]),
    "roberta": ([16, 32], 0.98, 1e-6, [10, 20], [1e-5, 2e-5], 0.1, [1000, 4000, 5000], [0.5, 0.7]),
}


@pytest.mark.parametrize("name", IMAGE)
def test_image_recipes_are_table_s2(name):
    recipe = load_recipe(name)
    head = recipe.head
    values = (recipe.batch_size, recipe.lr, recipe.weight_decay, head["dropout"], head["left_dim"])
    assert values == IMAGE[name] and head["right_dim"] == head["left_dim"] and head["heads"] == 6
    assert (recipe.epochs, recipe.cooldown_epochs, recipe.warmup_epochs) == (300, 10, 5)
    assert (recipe.min_lr, recipe.warmup_lr, recipe.schedule, recipe.ema) == (1e-5, 1e-6, "cosine", 0.99996)
    assert (recipe.label_smoothing, recipe.mixup, recipe.cutmix, recipe.erasing) == (0.1, 0.8, 1.0, 0.25)
    assert recipe.rand_augment.startswith("rand-m9-mstd0.5") and recipe.img_size == (112 if name == "sot_7" else 224)


@pytest.mark.parametrize("name", TEXT)
def test_text_recipes_are_table_s3(name):
    recipe = load_recipe(name)
    batches, beta2, epsilon, epochs, rates, decay, sizes, dropouts = TEXT[name]
    grid = recipe.grid
    assert (recipe.betas, recipe.adam_epsilon, recipe.weight_decay) == ((0.9, beta2), epsilon, decay)
    assert grid.get("batch_size", [recipe.batch_size]) == batches and recipe.batch_size in batches
    assert grid.get("epochs", [recipe.epochs]) == epochs and recipe.epochs in epochs
    assert grid.get("lr", [recipe.lr]) == rates and recipe.lr in rates
    assert grid["head.representation_size"] == sizes and recipe.head["representation_size"] in sizes
    assert grid["head.dropout"] == dropouts and recipe.head["dropout"] in dropouts
    assert (recipe.schedule, recipe.min_lr) == ("linear", 0.0)
    for key, values in grid.items():
        for value in values:
            assert recipe.changed([f"{key}={value}"]) is not None


def test_every_recipe_goes_through_yaml_and_back():
    for name in recipe_names():
        recipe = load_recipe(name)
        assert Recipe.from_dict(yaml.safe_load(recipe.to_yaml())) == recipe and recipe.about


def test_settings_change_a_recipe_and_reach_into_its_head():
    recipe = load_recipe("sot_tiny").changed(["lr=5e-4", "epochs=3", "head.dropout=0.2", "rand_augment=null"])
    assert (recipe.lr, recipe.epochs, recipe.head["dropout"], recipe.rand_augment) == (5e-4, 3, 0.2, None)
    assert recipe.with_head({"fusion": "class"}).head["fusion"] == "class"


@pytest.mark.parametrize(
    "settings, warmup",
    [
        (["epochs=2"], 0.1),  # five of a hundred
        (["epochs=9"], 0.45),
        (["epochs=10"], 5),  # half of the run: as the recipe has it
        (["epochs=200"], 5),
        (["lr=1e-3"], 5),
        (["epochs=2", "warmup_epochs=2"], 2),
    ],
)
def test_fewer_epochs_leave_a_warmup_its_share(settings, warmup):
    recipe = load_recipe("scratch").changed(settings)
    assert recipe.warmup_epochs == pytest.approx(warmup)
    assert recipe.changed(["seed=1"]).warmup_epochs == recipe.warmup_epochs
    values = dict(map(parse_setting, settings))
    assert settle((load_recipe("scratch"), None), values)[0].warmup_epochs == recipe.warmup_epochs


def test_a_warmup_that_is_set_is_not_shortened_but_refused():
    for settings in (["epochs=2", "warmup_epochs=5"], ["warmup_epochs=101"]):
        with pytest.raises(ValueError, match=r"warmup_epochs must be at most epochs \(\d+\), got"):
            load_recipe("scratch").changed(settings)


def norm_of(head):
    config = HeadConfig.from_dict(head) if isinstance(head, dict) else head
    return config.norm, config.exponent, config.num_values, config.num_iterations


def test_recipes_of_the_paper_name_its_norm_and_the_others_take_the_default():
    for name in recipe_names():
        of_paper = name in (*IMAGE, *TEXT, "ablation_cpu")
        assert norm_of(load_recipe(name).head) == norm_of(HeadConfig.paper() if of_paper else HeadConfig()), name
        assert not of_paper or load_recipe(name).head["norm"] == "svpn_fast"


def test_settings_replace_what_contradicts_them_in_a_recipe():
    recipe = load_recipe("bert")
    sized = recipe.changed(["head.left_dim=8", "head.right_dim=9"])
    assert "representation_size" not in sized.head and (sized.head["left_dim"], sized.head["right_dim"]) == (8, 9)
    assert HeadConfig.from_dict(load_recipe("sot_7").with_head({"representation_size": 600}).head).left_dim == 10
    for settings in (["head.norm=svpn", "head.exponent=0.3"], ["head.exponent=0.3", "head.norm=svpn"]):
        assert norm_of(load_recipe("text_cpu").changed(settings).head) == ("svpn", 0.3, 1, None)
    assert norm_of(load_recipe("text_cpu").changed(["head.norm=svpn_fast"]).head) == norm_of(HeadConfig.paper())
    with pytest.raises(ValueError, match="representation_size=99 means left_dim=10, got left_dim=8"):
        recipe.changed(["head.left_dim=8", "head.representation_size=99"])
    with pytest.raises(ValueError, match="num_iterations=2 is for svpn_fast and isqrt only, got norm 'svpn'"):
        load_recipe("text_cpu").changed(["head.num_iterations=2"])


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("digits", None, HeadConfig()),
        ("digits", "", HeadConfig()),
        ("digits", "fusion=word,dropout=0.5", HeadConfig(fusion="word", dropout=0.5)),
        ("digits", "norm=svpn", HeadConfig(norm="svpn", exponent=0.5)),
        ("digits", "pool=gcp", HeadConfig(pool="gcp")),
        ("digits", "num_iterations=2", HeadConfig.paper(num_iterations=2)),
        ("digits", "paper", HeadConfig.paper()),
        ("digits", "paper,fusion=word", HeadConfig.paper(fusion="word")),
        ("digits", "paper, pool=gcp", HeadConfig.paper(pool="gcp")),
        ("sot_7", None, HeadConfig.paper()),
        ("sot_7", "norm=svpn,exponent=0.25", HeadConfig()),
        ("demo", "paper", HeadConfig.paper(left_dim=8, right_dim=8)),
        ("demo", "representation_size=1176", HeadConfig(representation_size=1176)),
        ("text_cpu", "paper", HeadConfig.paper(heads=1, representation_size=1000, dropout=0.5)),
        ("text_cpu", "left_dim=8,right_dim=8", HeadConfig(heads=1, left_dim=8, right_dim=8, dropout=0.5)),
        ("bert", "pool=gcp,dropout=0", HeadConfig(pool="gcp", representation_size=1000)),
        ("bert", "pool=gap,dropout=0", HeadConfig(pool="gap")),
        ("digits", "none", None),
    ],
)
def test_the_command_line_changes_the_head_of_a_recipe(name, text, expected):
    assert parse_head(text, load_recipe(name)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pool", "key=value, got 'pool'; or --head paper, or --head none"),
        ("fusion=word,paper", "key=value, got 'paper'"),
        ("exponent=", "key=value, got 'exponent='"),
        ("representation_size=99,left_dim=8", "representation_size=99 means left_dim=4, got left_dim=8"),
        ("paper,num_values=2,norm=svpn", "num_values=2 is for svpn_fast only, got norm 'svpn'"),
    ],
)
def test_a_head_that_cannot_be_is_refused_on_the_command_line(text, message):
    with pytest.raises(ValueError, match=message):
        parse_head(text, load_recipe("digits"))


def test_a_users_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("epochs: 2\nlr: 1e-2\nscale: [0.5, 1]\n")
    assert load_recipe(str(tmp_path / "mine.yaml")) == Recipe(epochs=2, lr=0.01, scale=(0.5, 1.0))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"learning_rate": 1}, "unknown recipe key 'learning_rate'; accepted: about, task, epochs"),
        ({"lr": "fast"}, "lr must be a number, got 'fast'"),
        ({"epochs": 1.5}, "epochs must be a whole number, got 1.5"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"schedule": "step"}, "schedule must be one of cosine, linear, constant, got 'step'"),
        ({"betas": [0.9]}, "betas must be a pair"),
        ({"head": {"pools": 1}}, "unknown head setting 'pools'"),
        ({"head": "mgcrp"}, "head must be a mapping"),
        ({"erasing": 2}, "erasing must be between 0 and 1"),
        ({"lr": 1e-4, "min_lr": 1e-3}, "min_lr must be between 0 and lr"),
        ({"rand_augment": 9}, "rand_augment must be text"),
        ({"rand_augment": "foo"}, "as timm writes it, such as rand-m9-mstd0.5-inc1, got 'foo'"),
        ({"cooldown_epochs": -1}, "cooldown_epochs must be at least 0, got -1"),
        ({"warmup_epochs": -1}, "warmup_epochs must be at least 0, got -1"),
        ({"epochs": 2, "warmup_epochs": 2.5}, r"warmup_epochs must be at most epochs \(2\), got 2.5"),
        ({"mixup": -1}, "mixup must be at least 0, got -1"),
        ({"lr": "nan"}, "lr must be at least 0, got nan"),
        ({"img_size": 0}, "img_size must be at least 1, got 0"),
        ({"betas": [0.9, 1]}, "betas must be at least 0 and below 1, got"),
        ({"scale": [1, 0.5]}, "scale must be the smallest and the largest share of a crop, got"),
    ],
)
def test_bad_values_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Recipe.from_dict(settings)


@pytest.mark.parametrize(
    "name, fits",
    [
        *((name, True) for name in ("rand", "rand-m9-mstd0.5-inc1", "rand-n3-p0.4-mmax20", "rand-tweights-m3")),
        *((name, False) for name in ("augmix-m3", "rand-m9.5", "rand-w0", "rand-x3", "rand-mstdx1", "Rand-m9", "")),
    ],
)
def test_an_augmentation_is_what_timm_reads(name, fits):
    from timm.data.auto_augment import rand_augment_transform

    if fits:
        assert Recipe(rand_augment=name).rand_augment == name and rand_augment_transform(name, {})
        return
    with pytest.raises((AssertionError, ValueError)):
        rand_augment_transform(name, {})
    with pytest.raises(ValueError, match="rand_augment must be as timm writes it"):
        Recipe(rand_augment=name)


def test_a_part_of_an_augmentation_that_timm_would_pass_over_is_refused():
    with pytest.raises(ValueError, match=r"rand_augment must be as timm writes it, .* got 'rand-hard'"):
        Recipe(rand_augment="rand-hard")


def test_bad_names_files_and_settings(tmp_path):
    with pytest.raises(ValueError, match="unknown recipe 'sot_huge'; accepted: ablation_cpu, bert, "):
        load_recipe("sot_huge")
    with pytest.raises(FileNotFoundError, match="no such recipe file"):
        load_recipe("missing.yaml")
    with pytest.raises(ValueError, match="form key=value, got 'lr'"):
        Recipe().changed(["lr"])
    with pytest.raises(ValueError, match=r"the value of 'head=\{' is not valid YAML"):
        Recipe().changed(["head={"])
    with pytest.raises(ValueError, match="this recipe is for task image, got task=text"):
        Recipe().changed(["task=text"])
    (tmp_path / "broken.yaml").write_text("a: [1")
    with pytest.raises(ValueError, match="not valid YAML"):
        load_recipe(str(tmp_path / "broken.yaml"))
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ValueError, match="must hold a mapping"):
        load_recipe(str(tmp_path / "list.yaml"))
