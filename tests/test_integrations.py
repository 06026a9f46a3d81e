"""What the ecosystem does with an equipped model: peft, compilers, exporters, quantisers, Trainer, DDP, pipelines."""

import copy

import pytest
import torch
from ddp_worker import BUILD, HEAD, TEXT, batch_of, bert, labels_of, run_rank, take_steps, vit
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
    set_seed,
)

import sot

TEXT_AND_IMAGE = pytest.mark.parametrize("name", ["bert", "vit"])


@pytest.fixture(scope="module", autouse=True)
def single_thread():
    """Models as small as these only wait for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits_of(model, inputs):
    with torch.no_grad():
        return model.eval()(**inputs).logits


def weights_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def largest_difference(first, second):
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


def gradients(model, inputs, labels, seed=0):
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(**inputs, labels=labels).loss
    loss.backward()
    return loss.item(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


# --- peft --------------------------------------------------------------------------------------------------

LORA = {
    "bert": {"task_type": "SEQ_CLS", "target_modules": ["query", "value"]},
    "gpt2": {"task_type": "SEQ_CLS", "target_modules": ["c_attn"], "fan_in_fan_out": True},
    "vit": {"target_modules": ["qkv"], "modules_to_save": ["classifier"]},
}


@pytest.mark.parametrize("name", list(LORA))
def test_lora_adapter_saves_the_head_and_loads_on_a_fresh_base(name, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    model, inputs = BUILD[name](), batch_of(name)
    base, start = copy.deepcopy(model), logits_of(model, inputs)
    fresh_head = weights_of(base.classifier)
    tuned = get_peft_model(model, LoraConfig(r=2, **LORA[name]))
    trained = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    for _ in range(2):  # LoRA's first matrix has a gradient only once its second is no longer zero
        optimizer.zero_grad()
        tuned(**inputs, labels=labels_of()).loss.backward()
        optimizer.step()
    tuned.save_pretrained(tmp_path)
    expected = logits_of(tuned, inputs)
    assert (expected - start).abs().max() > 1e-2

    loaded = PeftModel.from_pretrained(base, tmp_path)
    assert torch.equal(logits_of(loaded, inputs), expected)
    merged = loaded.merge_and_unload()
    assert type(merged) is type(model)
    assert torch.allclose(logits_of(merged, inputs), expected, atol=1e-5)
    with tuned.disable_adapter():
        assert torch.equal(logits_of(tuned, inputs), start)
    trained_head = tuned.base_model.model.classifier.modules_to_save["default"].state_dict()
    assert largest_difference(weights_of(merged.classifier), trained_head) == 0
    assert all((trained_head[name] != value).any() for name, value in fresh_head.items())  # every part of it trained


def test_lora_attaches_to_a_timm_backbone_that_shares_weights_between_modules():
    from peft import LoraConfig, get_peft_model

    model = sot.equip("coat_lite_tiny", 3, HEAD, pretrained=False)
    tuned = get_peft_model(model, LoraConfig(r=2, **LORA["vit"]))
    trained = {name.split(".")[2] for name, parameter in tuned.named_parameters() if parameter.requires_grad}
    assert trained == {"backbone", "classifier"}


# --- gradient checkpointing --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "name", "block"), [(bert, "bert", "encoder.layer.0"), (vit, "vit", "timm_model.blocks.0")]
)
def test_gradient_checkpointing_recomputes_and_changes_nothing(build, name, block):
    model, inputs, calls = build().train(), batch_of(name), []
    model.backbone.get_submodule(block).register_forward_pre_hook(lambda *_: calls.append(1))
    loss, expected = gradients(model, inputs, labels_of())
    assert len(calls) == 1
    model.gradient_checkpointing_enable()
    again, found = gradients(model, inputs, labels_of())  # BERT drops out: the recomputation has to repeat it
    assert len(calls) == 3  # once forwards, once more while going backwards
    assert again == loss and largest_difference(found, expected) <= 1e-6
    model.gradient_checkpointing_disable()
    gradients(model, inputs, labels_of())
    assert len(calls) == 4


# --- compilers and exporters -------------------------------------------------------------------------------


@TEXT_AND_IMAGE
def test_compile_makes_one_graph_with_the_same_logits_and_gradients(name):
    from torch._dynamo.testing import CompileCounterWithBackend

    model, inputs = BUILD[name]().eval(), batch_of(name)
    loss, expected = gradients(model, inputs, labels_of())
    logits = logits_of(model, inputs)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    output = compiled(**inputs, labels=labels_of())
    assert counter.frame_count == 1
    assert torch.allclose(output.logits, logits, atol=1e-5) and abs(output.loss.item() - loss) <= 1e-5
    model.zero_grad()
    output.loss.backward()
    assert largest_difference({name: p.grad for name, p in model.named_parameters()}, expected) <= 1e-5


@TEXT_AND_IMAGE
def test_exported_program_takes_another_batch_and_length(name):
    model, inputs = BUILD[name]().eval(), batch_of(name, batch=3, length=9)
    axes = {0: torch.export.Dim("batch", min=1, max=64)}
    if name == "bert":
        axes[1] = torch.export.Dim("length", min=3, max=512)
    program = torch.export.export(model, (), inputs, dynamic_shapes=dict.fromkeys(inputs, axes)).module()
    for batch, length in ((5, 12), (2, 3)):
        other = batch_of(name, batch, length, seed=1)
        assert torch.allclose(program(**other).logits, logits_of(model, other), atol=1e-5)


@TEXT_AND_IMAGE
def test_onnx_runs_at_another_batch_and_length(name, tmp_path):
    import onnxruntime
    from transformers.exporters import OnnxConfig, OnnxExporter

    model, file = BUILD[name]().eval(), tmp_path / "model.onnx"
    config = OnnxConfig(dynamic=True, output_path=str(file))
    OnnxExporter().export(model, batch_of(name, batch=3, length=9), config)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for batch, length in ((5, 12), (1, 4)):
        other = batch_of(name, batch, length, seed=1)
        (found,) = session.run(["logits"], {key: value.numpy() for key, value in other.items()})
        assert (torch.from_numpy(found) - logits_of(model, other)).abs().max() <= 1e-4


# --- quantisation and half precision -----------------------------------------------------------------------


@TEXT_AND_IMAGE
def test_eight_bit_weights_leave_the_head_alone(name, tmp_path):
    from torchao.quantization import Int8WeightOnlyConfig
    from torchao.utils import TorchAOBaseTensor
    from transformers import TorchAoConfig

    model, inputs = BUILD[name](), batch_of(name)
    model.save_pretrained(tmp_path)
    small = type(model).from_pretrained(tmp_path, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
    quantised = {name for name, value in small.named_parameters() if isinstance(value, TorchAOBaseTensor)}
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert quantised == {name for name in linear if name.startswith("backbone.")} and len(quantised) >= 8
    assert largest_difference(weights_of(small.classifier), weights_of(model.classifier)) == 0
    expected = logits_of(model, inputs)
    difference = (logits_of(small, inputs) - expected).abs().max()
    assert 0 < difference <= 0.1 * expected.abs().max()
    small.save_pretrained(tmp_path / "small")
    again = type(model).from_pretrained(tmp_path / "small")
    assert torch.equal(logits_of(again, inputs), logits_of(small, inputs))


@TEXT_AND_IMAGE
def test_autocast_trains_with_the_matrix_part_in_float32(name):
    model, inputs, seen = BUILD[name]().train(), batch_of(name), []
    pool = model.classifier.pool
    pool.projection.register_forward_hook(lambda _, __, output: seen.append(output))
    pool.norm.register_forward_hook(lambda _, args, output: seen.extend([args[0], output]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**inputs, labels=labels_of()).loss
    loss.backward()
    projected, matrix, normalized = seen
    assert (projected.dtype, matrix.dtype, normalized.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    left, right = (part.unflatten(-1, (2, -1)).double() for part in projected.split([2 * 3, 2 * 4], dim=-1))
    product = torch.einsum("bthm,bthn->bhmn", left, right).flatten(1)  # padding was projected to zero
    cosine = nn.functional.cosine_similarity(matrix.flatten(1).double(), product)
    assert (1 - cosine).max() <= 1e-10  # a product in bfloat16 would be off by 1e-6
    exact = model(**inputs, labels=labels_of()).loss
    assert abs(loss.item() - exact.item()) <= 0.02
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@TEXT_AND_IMAGE
@pytest.mark.parametrize(("dtype", "of_head"), [("float16", "float32"), ("bfloat16", "float32")])
def test_model_loads_in_half_precision(name, dtype, of_head, tmp_path):
    """Transformers' `_keep_in_fp32_modules` guards a module against float16 alone: bfloat16 has the same range."""
    model, inputs, seen = BUILD[name](), batch_of(name), []
    model.save_pretrained(tmp_path)
    half = type(model).from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    assert {parameter.dtype for parameter in half.backbone.parameters()} == {getattr(torch, dtype)}
    assert {parameter.dtype for parameter in half.classifier.parameters()} == {getattr(torch, of_head)}
    half.classifier.pool.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    logits, expected = logits_of(half, inputs), logits_of(model, inputs)
    assert seen == [torch.float32]
    assert (logits.float() - expected).abs().max() <= 0.05 * expected.abs().max()


# --- Trainer -----------------------------------------------------------------------------------------------


def train(model, inputs, folder, **settings):
    """Train with the stock Trainer; returns it."""
    labels = labels_of(16)
    data = [{key: value[i] for key, value in inputs.items()} | {"labels": labels[i]} for i in range(16)]
    quiet = {"disable_tqdm": True, "report_to": "none", "use_cpu": True, "save_strategy": "no"}
    arguments = TrainingArguments(str(folder), logging_steps=1, lr_scheduler_type="constant", **quiet, **settings)
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    return trainer


@TEXT_AND_IMAGE
def test_stock_trainer_trains_saves_and_loads(name, tmp_path):
    model, inputs = BUILD[name](), batch_of(name, 16)
    trainer = train(model, inputs, tmp_path, max_steps=20, per_device_train_batch_size=16, learning_rate=5e-3)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 20 and losses[-1] < 0.5 * losses[0]
    trainer.save_model(tmp_path / "trained")
    loader = AutoModelForSequenceClassification if name == "bert" else AutoModelForImageClassification
    loaded = loader.from_pretrained(tmp_path / "trained")
    assert torch.equal(logits_of(loaded, inputs), logits_of(model, inputs))


@TEXT_AND_IMAGE
def test_accumulated_gradients_are_those_of_the_whole_batch(name, tmp_path):
    start, inputs = BUILD[name](), batch_of(name, 16)
    settings = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "max_steps": 2}
    whole, parts = copy.deepcopy(start), copy.deepcopy(start)
    train(whole, inputs, tmp_path, per_device_train_batch_size=16, **settings)
    train(parts, inputs, tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=4, **settings)
    assert largest_difference(whole.state_dict(), start.state_dict()) > 1e-3
    assert largest_difference(whole.state_dict(), parts.state_dict()) <= 1e-6


# --- several processes -------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_two_processes_train_as_one_without_unused_parameters(tmp_path):
    torch.multiprocessing.spawn(run_rank, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert "not used in producing loss" in first.pop("error") and second.pop("error")  # the check does check
    assert list(first) == list(BUILD)
    for name, build in BUILD.items():
        torch.manual_seed(0)
        alone = build().train()
        take_steps(alone, batch_of(name), labels_of())
        assert largest_difference(first[name], second[name]) == 0
        assert largest_difference(first[name], alone.state_dict()) <= 1e-6


# --- pipelines and seeds -----------------------------------------------------------------------------------


def scores(answer):
    return {entry["label"]: entry["score"] for entry in answer}


def test_text_pipeline_answers_with_the_names_of_the_classes(tmp_path):
    words = ["[PAD]", "[UNK]", "good", "bad", "film"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    tokenizer.save_pretrained(tmp_path / "backbone")
    BertModel(BertConfig(**TEXT)).save_pretrained(tmp_path / "backbone")
    model = sot.equip(tmp_path / "backbone", labels=["negative", "positive"], head=HEAD)
    model.save_pretrained(tmp_path / "equipped")
    texts = ["good film", "bad bad film good bad"]  # the first is padded
    classify = pipeline("text-classification", str(tmp_path / "equipped"))
    answers = classify(texts, top_k=None, batch_size=2)
    expected = logits_of(model, tokenizer(texts, padding=True, return_tensors="pt")).softmax(-1)
    for answer, row in zip(answers, expected):
        assert scores(answer) == pytest.approx({"negative": row[0].item(), "positive": row[1].item()}, abs=1e-6)


def test_image_pipeline_answers_with_the_names_of_the_classes(tmp_path):
    model = sot.equip("test_vit", head=HEAD, pretrained=False, labels=["cat", "dog", "eel"])
    model.save_pretrained(tmp_path)
    pixels = torch.randint(0, 256, (50, 70, 3), dtype=torch.uint8).numpy()
    answer = pipeline("image-classification", str(tmp_path))(Image.fromarray(pixels))
    inputs = model.processor(Image.fromarray(pixels), return_tensors="pt")
    assert inputs["pixel_values"].shape == (1, 3, 160, 160)
    expected = logits_of(model, inputs).softmax(-1)[0].tolist()
    assert scores(answer) == pytest.approx(dict(zip(["cat", "dog", "eel"], expected)), abs=1e-6)


@pytest.mark.parametrize("name", list(BUILD))
def test_a_seed_decides_the_model_and_without_one_two_models_differ(name):
    built = []
    for seed in (5, 5, None):
        if seed is not None:
            set_seed(seed)
        built.append(BUILD[name]())
    first, same, other = (weights_of(model) for model in built)
    assert largest_difference(first, same) == 0
    assert torch.equal(logits_of(built[0], batch_of(name)), logits_of(built[1], batch_of(name)))
    drawn = [key for key in first if first[key].ndim > 1 or key.endswith("start")]
    assert len(drawn) >= 5 and all((first[key] != other[key]).any() for key in drawn)
    take_steps(built[0].train(), batch_of(name), labels_of())  # models of one process share nothing
    assert largest_difference(weights_of(built[1]), same) == 0
    assert largest_difference(weights_of(built[0]), first) > 1e-4
