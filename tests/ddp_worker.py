"""Tiny models of each kind, and what one of several processes does with them: spawned, so it is a module of its own."""

import functools
import os

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

import sot

HEAD = {"heads": 2, "left_dim": 3, "right_dim": 4}
SIZE = 32  # of the images
TEXT = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SIGLIP = {"img_size": SIZE, "embed_dim": 16, "depth": 1, "num_heads": 2}  # keeps a pooling of its own in timm


def bert(**settings):
    return sot.equip(BertModel(BertConfig(**TEXT, **settings)), 3, HEAD)


def gpt2():
    config = GPT2Config(vocab_size=99, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return sot.equip(GPT2Model(config), 3, HEAD)


def vit():
    return sot.equip("test_vit", 3, HEAD, pretrained=False, model_args={"img_size": SIZE, "depth": 2})


def siglip():
    head = {**HEAD, "fusion": "word"}
    return sot.equip("vit_base_patch16_siglip_224", 3, head, pretrained=False, model_args=SIGLIP)


BUILD = {"bert": functools.partial(bert, **NO_DROPOUT), "gpt2": gpt2, "vit": vit, "siglip": siglip}


def batch_of(name, batch=4, length=7, seed=0):
    """Inputs of a model: images, or texts of which the last is padded."""
    generator = torch.Generator().manual_seed(seed)
    if name in ("vit", "siglip"):
        return {"pixel_values": torch.randn(batch, 3, SIZE, SIZE, generator=generator)}
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, -1:] = 0
    return {"input_ids": torch.randint(1, 99, (batch, length), generator=generator), "attention_mask": mask}


def labels_of(batch=4):
    return torch.arange(batch) % 3


def take_steps(model, inputs, labels):
    """Two steps: DistributedDataParallel complains of the first step's unused parameters in the second."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(**inputs, labels=labels).loss.backward()
        optimizer.step()


def run_rank(rank, folder):
    """One of two processes: each model on half of the batch, then a model that has to fail."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    half, result = slice(2 * rank, 2 * rank + 2), {}
    for name, build in BUILD.items():
        torch.manual_seed(rank)  # rank 1 starts from other weights and has to receive those of rank 0
        model = build().train()
        wrapped = DistributedDataParallel(model, find_unused_parameters=False)
        take_steps(wrapped, {key: value[half] for key, value in batch_of(name).items()}, labels_of()[half])
        result[name] = model.state_dict()
    with_pooler = DistributedDataParallel(BertModel(BertConfig(**TEXT)), find_unused_parameters=False)
    try:
        for _ in range(2):
            with_pooler(**batch_of("bert")).last_hidden_state.sum().backward()
    except RuntimeError as error:
        result["error"] = str(error)
    torch.save(result, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()
