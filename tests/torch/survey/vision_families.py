"""Which image and video models the survey trains: a small one of each family."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torchvision.models as tv
from torch import nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.swin_transformer import SwinTransformer, SwinTransformerBlockV2
from torchvision.models.video import MViT, SwinTransformer3d
from torchvision.models.video.mvit import MSBlockConfig

CLASSES = 10
Build = Callable[[], nn.Module]


def _head(width: int) -> nn.Module:
    """A classifier of 64 units: those of AlexNet and VGG hold 50 to 120 million parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(width, 64), nn.ReLU(True), nn.Linear(64, CLASSES))


def _alexnet() -> nn.Module:
    model = tv.get_model("alexnet")
    return nn.Sequential(model.features, model.avgpool, _head(256 * 36))


def _vgg(batch_norm: bool) -> nn.Module:
    features = tv.vgg.make_layers(tv.vgg.cfgs["A"], batch_norm=batch_norm)
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(2), _head(512 * 4))


def _s3d() -> nn.Module:
    model = tv.get_model("s3d", num_classes=CLASSES)
    model.avgpool = nn.AdaptiveAvgPool3d(1)  # its own requires 224 x 224
    return model


def _convnext() -> nn.Module:
    return ConvNeXt([CNBlockConfig(32, 64, 2), CNBlockConfig(64, None, 2)], num_classes=CLASSES)


def _swin(**options: Any) -> nn.Module:
    sizes = {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    return SwinTransformer(patch_size=[4, 4], num_classes=CLASSES, stochastic_depth_prob=0.0, **sizes, **options)


def _swin3d() -> nn.Module:
    sizes = {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": [2, 4, 4]}
    return SwinTransformer3d(patch_size=[2, 4, 4], num_classes=CLASSES, stochastic_depth_prob=0.0, **sizes)


def _mvit() -> nn.Module:
    def block(heads: int, inside: int, outside: int, stride: int) -> MSBlockConfig:
        return MSBlockConfig(heads, inside, outside, [3, 3, 3], [3, 3, 3], [1, stride, stride], [1, 2, 2])

    blocks = [block(1, 16, 16, 1), block(2, 16, 32, 2), block(2, 32, 32, 1)]
    return MViT(
        (32, 32), 4, blocks, residual_pool=True, residual_with_cls_embed=False, rel_pos_embed=True,
        proj_after_attn=True, num_classes=CLASSES, stochastic_depth_prob=0.0,
        patch_embed_kernel=(3, 7, 7), patch_embed_stride=(2, 4, 4),
    )  # fmt: skip


def _transformer() -> nn.Module:
    sizes = {"num_layers": 2, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
    return tv.VisionTransformer(image_size=64, patch_size=16, num_classes=CLASSES, **sizes)


def _maxvit() -> nn.Module:
    sizes = {"stem_channels": 16, "block_channels": [16, 32], "block_layers": [1, 1], "head_dim": 8}
    return tv.MaxVit(input_size=(64, 64), partition_size=4, stochastic_depth_prob=0.0, num_classes=CLASSES, **sizes)


def _wide_resnet() -> nn.Module:
    return tv.ResNet(tv.resnet.Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, width_per_group=128)


def _named(name: str, **options: Any) -> Build:
    return partial(tv.get_model, name, num_classes=CLASSES, **options)


_PLAIN = {"aux_logits": False, "init_weights": False}

IMAGES: dict[str, tuple[Build, int]] = {
    "alexnet": (_alexnet, 64),
    "convnext": (_convnext, 64),
    "densenet121": (_named("densenet121"), 64),
    "efficientnet_b0": (_named("efficientnet_b0"), 64),
    "efficientnet_v2_s": (_named("efficientnet_v2_s"), 64),
    "googlenet": (_named("googlenet", **_PLAIN), 64),
    "inception_v3": (_named("inception_v3", **_PLAIN), 96),
    "maxvit": (_maxvit, 64),
    "mnasnet0_5": (_named("mnasnet0_5"), 64),
    "mobilenet_v2": (_named("mobilenet_v2"), 64),
    "mobilenet_v3_small": (_named("mobilenet_v3_small"), 64),
    "regnet_x_400mf": (_named("regnet_x_400mf"), 64),
    "regnet_y_400mf": (_named("regnet_y_400mf"), 64),
    "resnet18": (_named("resnet18"), 64),
    "resnext50_32x4d": (_named("resnext50_32x4d"), 64),
    "shufflenet_v2_x0_5": (_named("shufflenet_v2_x0_5"), 64),
    "squeezenet1_1": (_named("squeezenet1_1"), 64),
    "swin": (_swin, 64),
    "swin_v2": (
        partial(_swin, block=SwinTransformerBlockV2, downsample_layer=tv.swin_transformer.PatchMergingV2), 64,
    ),
    "vgg11": (partial(_vgg, False), 32),
    "vgg11_bn": (partial(_vgg, True), 32),
    "vit": (_transformer, 64),
    "wide_resnet50_2": (_wide_resnet, 64),
}  # fmt: skip
"""Of torchvision: name -> how it is built, side of the images."""

SEGMENTATION: dict[str, tuple[Build, int]] = {
    "deeplabv3_mobilenet_v3_large": (_named("deeplabv3_mobilenet_v3_large", weights_backbone=None), 64),
    "fcn_resnet50": (_named("fcn_resnet50", weights_backbone=None), 64),
    "lraspp_mobilenet_v3_large": (_named("lraspp_mobilenet_v3_large", weights_backbone=None), 64),
}

VIDEO: dict[str, tuple[Build, int, int]] = {
    "mc3_18": (_named("mc3_18"), 4, 32),
    "mvit_v2": (_mvit, 4, 32),
    "r2plus1d_18": (_named("r2plus1d_18"), 4, 32),
    "r3d_18": (_named("r3d_18"), 4, 32),
    "s3d": (_s3d, 8, 64),
    "swin3d": (_swin3d, 4, 32),
}
"""Of torchvision: name -> how it is built, frames, side of the images."""

TIMM: dict[str, tuple[str, dict[str, Any], int]] = {
    "beit": ("beit_base_patch16_224", {"img_size": 64, "embed_dim": 96, "depth": 2, "num_heads": 4}, 64),
    "byoanet": ("botnet26t_256", {"img_size": 64}, 64),
    "byoanet_lambda": ("lambda_resnet26t", {}, 64),
    "byobnet": ("test_byobnet", {"img_size": 64}, 64),
    "cait": ("cait_xxs24_224", {"img_size": 64}, 64),
    "coat": ("coat_tiny", {"img_size": 64}, 64),
    "convit": ("convit_tiny", {"img_size": 64}, 64),
    "convmixer": ("convmixer_768_32", {}, 64),
    "convnext": ("test_convnext", {}, 64),
    "cpubone": ("cpubone_nano", {}, 64),
    "crossvit": ("crossvit_tiny_240", {}, 64),
    "csatv2": ("csatv2", {}, 64),
    "cspnet": ("cs3darknet_focus_s", {}, 64),
    "cspnext": ("cspnext_tiny", {}, 64),
    "davit": ("davit_tiny", {"embed_dims": (32, 64, 128, 256), "num_heads": (1, 2, 4, 8), "depths": (1, 1, 1, 1)}, 64),
    "deepseek_vit": ("deepseek_vit_412m", {"embed_dim": 96, "depth": 2, "num_heads": 4}, 56),
    "deit": ("deit_tiny_patch16_224", {"img_size": 64}, 64),
    "densenet": ("densenet121", {}, 64),
    "dla": ("dla46x_c", {}, 64),
    "dpn": ("dpn48b", {}, 64),
    "edgenext": ("edgenext_xx_small", {}, 64),
    "efficientformer": ("efficientformer_l1", {"embed_dims": (16, 32, 64, 96), "depths": (1, 1, 1, 2)}, 224),
    "efficientformer_v2": ("efficientformerv2_s0", {"img_size": 64}, 64),
    "efficientnet": ("test_efficientnet", {}, 64),
    "efficientvim": ("efficientvim_m1", {}, 64),
    "efficientvit_mit": ("efficientvit_b0", {}, 64),
    "efficientvit_msra": ("efficientvit_m0", {"img_size": 64}, 64),
    "eva": ("vit_tiny_patch16_dinov3_qkvb", {"img_size": 64}, 64),
    "fasternet": ("fasternet_t0", {}, 64),
    "fastvit": ("fastvit_t8", {}, 64),
    "focalnet": ("focalnet_tiny_srf", {}, 64),
    "gcvit": ("gcvit_xxtiny", {"img_size": 64}, 64),
    "gemma4_vit": ("gemma4_vit_167m", {"embed_dim": 96, "depth": 2, "num_heads": 4}, 96),
    "ghostnet": ("ghostnet_050", {}, 64),
    "hardcorenas": ("hardcorenas_b", {}, 64),
    "hgnet": ("hgnetv2_b0", {}, 64),
    "hiera": ("hiera_tiny_224", {"img_size": 64, "embed_dim": 32, "stages": (1, 1, 2, 1)}, 64),
    "hieradet_sam2": ("sam2_hiera_tiny", {"stages": (1, 1, 2, 1), "global_att_blocks": (3,)}, 256),
    "hrnet": ("hrnet_w18_small", {}, 64),
    "iformer": ("iformer_t", {}, 64),
    "inception_next": ("inception_next_atto", {}, 64),
    "lcnetv2": ("lcnetv2_small", {}, 64),
    "levit": ("levit_128s", {"img_size": 64}, 64),
    "lowformer": ("lowformer_b0", {}, 64),
    "mambaout": ("test_mambaout", {}, 64),
    "maxxvit": ("test_coatnet", {"img_size": 64}, 64),
    "metaformer": ("poolformerv2_s12", {}, 64),
    "mlp_mixer": ("gmlp_ti16_224", {"img_size": 64}, 64),
    "mobilenetv3": ("lcnet_035", {}, 64),
    "mobilevit": ("mobilevit_xxs", {"img_size": 64}, 64),
    "mvitv2": ("mvitv2_tiny", {"img_size": 64}, 64),
    "naflexvit": ("naflexvit_base_patch16_gap", {"embed_dim": 96, "depth": 2, "num_heads": 4}, 64),
    "nest": ("nest_tiny", {"img_size": 64}, 64),
    "nfnet": ("test_nfnet", {}, 64),
    "pit": ("pit_ti_224", {"img_size": 64}, 64),
    "pvt_v2": ("pvt_v2_b0", {}, 64),
    "qwen3_vit": ("qwen3_vit_88m", {"embed_dim": 96, "depth": 2, "num_heads": 4}, 64),
    "regnet": ("regnetx_002", {}, 64),
    "repghost": ("repghostnet_050", {}, 64),
    "repvit": ("repvit_m1", {"img_size": 64}, 64),
    "resnest": ("resnest14d", {}, 64),
    "resnet": ("test_resnet", {}, 64),
    "resnetv2": ("resnetv2_18", {}, 64),
    "rexnet": ("rexnet_100", {}, 64),
    "senet": ("legacy_seresnet18", {}, 64),
    "sequencer": ("sequencer2d_s", {"img_size": 64, "layers": (1, 1, 1, 1)}, 64),
    "shvit": ("shvit_s1", {}, 64),
    "sknet": ("skresnet18", {}, 64),
    "starnet": ("starnet_s050", {}, 64),
    "swiftformer": ("swiftformer_xs", {"img_size": 64}, 64),
    "swin_transformer": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 64, "window_size": 4, "embed_dim": 24, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 4, 8)},
        64,
    ),
    "swin_transformer_v2": (
        "swinv2_tiny_window8_256",
        {"img_size": 64, "window_size": 4, "embed_dim": 24, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 4, 8)},
        64,
    ),
    "swin_transformer_v2_cr": (
        "swinv2_cr_tiny_224",
        {"img_size": 64, "window_size": 4, "embed_dim": 24, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 4, 8)},
        64,
    ),
    "tiny_vit": ("tiny_vit_5m_224", {}, 64),
    "tnt": ("tnt_s_legacy_patch16_224", {"img_size": 64, "depth": 2}, 64),
    "tresnet": ("tresnet_m", {"layers": [1, 1, 1, 1]}, 64),
    "twins": ("twins_svt_small", {"img_size": 64, "depths": (1, 1, 1, 1)}, 64),
    "visformer": ("visformer_tiny", {"img_size": 64}, 64),
    "vision_transformer": ("test_vit", {"img_size": 64}, 64),
    "vision_transformer_hybrid": ("vit_tiny_r_s16_p8_224", {"img_size": 64, "depth": 2}, 64),
    "vision_transformer_relpos": ("vit_relpos_small_patch16_224", {"img_size": 64, "depth": 2}, 64),
    "vision_transformer_sam": (
        "samvit_base_patch16_224",
        {"img_size": 64, "embed_dim": 96, "depth": 2, "num_heads": 4},
        64,
    ),
    "volo": ("volo_d1_224", {"img_size": 64}, 64),
    "vovnet": ("ese_vovnet19b_slim_dw", {}, 64),
    "xcit": ("xcit_nano_12_p16_224", {"img_size": 64, "depth": 2}, 64),
}
"""Family (a module of timm, or a second model of one) -> model, options, side of the images."""
