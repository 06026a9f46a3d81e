"""Small trained models for the tests of the page."""

import torch
from test_explain_faithfulness import fit, sentences
from test_explain_text import make_bert, make_tokenizer
from timm.data import create_transform

from sot.data.images import load_images
from sot.models.equip import equip


def save_digits(folder, fusion="sum", steps=300, side=32):
    """A transformer of two layers that knows most digits."""
    torch.manual_seed(0)
    data = load_images("digits")
    size = {"img_size": side, "patch_size": 4, "embed": "naive", "depth": 2, "embed_dim": 48, "num_heads": 4}
    head = {"heads": 3, "left_dim": 8, "right_dim": 8, "fusion": fusion}
    model = equip("sot_7", labels=data.labels, head=head, pretrained=False, model_args=size)
    prepare = create_transform(
        (3, side, side), mean=model.processor.image_mean, std=model.processor.image_std, crop_pct=1
    )
    pixels = torch.stack([prepare(picture) for picture, _ in data.train])
    labels = torch.tensor([label for _, label in data.train])

    def batches():
        while True:
            for batch in torch.randperm(len(labels)).split(64)[:-1]:
                yield {"pixel_values": pixels[batch], "labels": labels[batch]}

    fit(model, batches(), 3e-3, steps).save_pretrained(folder)
    return folder


def save_verbs(folder, steps=120):
    """A small BERT that tells by its verb whether a sentence is odd or even."""
    torch.manual_seed(0)
    rows = sentences(300)
    tokenizer = make_tokenizer([sentence for sentence, *_ in rows])
    model = equip(make_bert(tokenizer), labels=["even", "odd"], head={"heads": 3, "left_dim": 8, "right_dim": 8})
    encoded = tokenizer([sentence for sentence, *_ in rows], padding=True, return_tensors="pt")
    labels = torch.tensor([label for _, label, _ in rows])

    def batches():
        while True:
            for batch in torch.randperm(len(rows)).split(32):
                kept = {name: encoded[name][batch] for name in ("input_ids", "attention_mask")}
                yield {**kept, "labels": labels[batch]}

    fit(model, batches(), 5e-3, steps)
    model.processor = tokenizer
    model.save_pretrained(folder)
    return folder
