"""`equip(depth=…)`: the first layers of a backbone are what the whole one computes after them."""

import pytest
import timm
import torch
import transformers as hf
from test_equip import ENCODERS, FAMILIES, HEAD, VIT, backbone, batch, logits
from torch import nn

import sot

NORMS = ("norm", "ln_f", "final_norm", "final_layer_norm", "encoder.final_layer_norm")  # after the last layer of some


def hidden_after(source, layers, inputs):
    """What a text model of transformers hands on after so many layers, before any last norm."""
    with torch.no_grad():
        return source.eval()(**inputs, output_hidden_states=True).hidden_states[layers]


@pytest.mark.parametrize("family", FAMILIES)
def test_depth_keeps_the_first_layers(family, tmp_path):
    source, inputs = backbone(FAMILIES[family]), batch()
    model = sot.equip(source, 3, HEAD, depth=1).eval()
    assert model.config.num_hidden_layers == 1 and source.config.num_hidden_layers == 2
    last = dict(source.named_modules()).get  # decoders and ModernBERT normalise what their last layer hands on
    norm = next(filter(None, map(last, NORMS)), nn.Identity())
    with torch.no_grad():
        kept = model.backbone(**inputs, return_dict=True).last_hidden_state
        expected = norm(hidden_after(source, 1, inputs))
    torch.testing.assert_close(kept, expected)
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(logits(again, **inputs), logits(model, **inputs))


def test_depth_of_image_models():
    image = torch.randn(2, 3, 32, 32)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=24, num_heads=2, depth=3).eval()
    vision = hf.ViTModel(hf.ViTConfig(**VIT)).eval()
    with torch.no_grad():
        words = sot.equip(vit, 2, depth=2).eval().tokens(image).word_tokens
        torch.testing.assert_close(words, vit.norm(vit.forward_intermediates(image, norm=False)[1][1].flatten(2).mT))
        words = sot.equip(vision, 2, depth=1).eval().tokens(image).word_tokens
        hidden = vision(image, output_hidden_states=True).hidden_states[1]
        torch.testing.assert_close(words, vision.layernorm(hidden)[:, 1:])


@pytest.mark.parametrize(
    ("model", "depth", "message"),
    [
        (lambda: backbone(ENCODERS["bert"]), 3, "depth must be an integer from 1 to 2, .* got 3"),
        (lambda: backbone(ENCODERS["bert"]), 0, "got 0"),
        (lambda: backbone(ENCODERS["bert"]), True, "got True"),
        (lambda: timm.create_model("swin_tiny_patch4_window7_224"), 2, "equal layers, SwinTransformer has none such"),
        (
            lambda: timm.create_model("vit_tiny_patch16_224", act_layer=nn.ReLU),
            2,
            "arguments that cannot be read off it",
        ),
        (lambda: hf.PvtModel(hf.PvtConfig()), 2, "equal layers, PvtConfig has none such"),
    ],
)
def test_depths_that_are_refused(model, depth, message):
    with pytest.raises(ValueError, match=message):
        sot.equip(model(), 2, depth=depth)
