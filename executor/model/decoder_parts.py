"""Recognizes a decoder of the common form in a model's modules, and takes it apart: what the rewriting passes work on.

The form: RMSNorm, attention with rotary positions, RMSNorm, gated MLP; norms of queries and keys and norms behind the
two branches where a model has them. By structure, not by the model's name: Llama, Mistral, Qwen and Gemma are all of
it. What modules do is measured where their code could mean several things (norms, activations, scale of the
embedding). Nothing here changes the model; that the parts are all there is, the comparison of logits proves.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from executor.model.decoder_form import DecoderParts, LayerParts, LinearPart, NormPart, Rotary
from executor.model.hook import AttentionHook
from executor.model.probe import Recorder

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_SANDWICH = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
_RTOL, _ATOL = 1e-4, 1e-5


class NotRecognizedError(Exception):
    """The model is not of the form, and this is where."""


def take_apart(model: Any, hook: AttentionHook) -> DecoderParts:
    """Look at a loaded model, and run it once on two tokens.

    Raises:
        NotRecognizedError: it is of another form.
    """
    base, head = model.base_model, model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    layers, last = getattr(base, "layers", None), getattr(base, "norm", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(last, nn.Module) or not isinstance(head, nn.Linear):
        raise NotRecognizedError("its layers, its last norm and its head are not where they are looked for")
    run = _observe(model, base, layers, hook)
    activations = {_activation(layer.mlp) for layer in layers}
    if len(activations) != 1:
        raise NotRecognizedError("its layers have different activations")
    return DecoderParts(
        layers=tuple(_layer(*each) for each in zip(layers, run.num_kv_heads, run.rotary_of_layer, strict=True)),
        rotaries=tuple(run.rotaries),
        embedding=embedding.weight.detach(),
        embedding_scale=_scale(run.first_input, embedding.weight.detach()[run.token_ids]),
        last_norm=_norm(last),
        head=_linear(head),
        intermediate_size=model.base_model.layers[0].mlp.down_proj.in_features,
        activation=activations.pop(),
        logits_softcap=float(getattr(model.config.get_text_config(), "final_logit_softcapping", None) or 0),
    )


def _layer(layer: Any, num_kv_heads: int, rotary: int) -> LayerParts:
    names = _children(layer, _LAYER, _SANDWICH)
    attention, mlp = layer.self_attn, layer.mlp
    has_head_norms = bool(_HEAD_NORMS & _children(attention, _ATTENTION, _HEAD_NORMS))
    _children(mlp, _MLP, set())
    sandwich = names >= _SANDWICH
    return LayerParts(
        before_attention=_norm(layer.input_layernorm),
        after_attention=_norm(layer.post_attention_layernorm) if sandwich else None,
        before_mlp=_norm(layer.pre_feedforward_layernorm if sandwich else layer.post_attention_layernorm),
        after_mlp=_norm(layer.post_feedforward_layernorm) if sandwich else None,
        query_norm=_norm(attention.q_norm) if has_head_norms else None,
        key_norm=_norm(attention.k_norm) if has_head_norms else None,
        **{name[0]: _linear(getattr(attention, name)) for name in _ATTENTION},
        **{name.removesuffix("_proj"): _linear(getattr(mlp, name)) for name in _MLP},
        num_kv_heads=num_kv_heads,
        rotary=rotary,
    )


def _children(module: nn.Module, needed: set[str], optional: set[str]) -> set[str]:
    """Names of the children that have parameters or children: `needed`, and all or none of `optional`."""
    names = {name for name, child in module.named_children() if any(True for _ in child.parameters())}
    if names not in (needed, needed | optional):
        unknown, missing = sorted(names - needed - optional), sorted(needed - names)
        raise NotRecognizedError(f"{type(module).__name__} has {unknown or names} and lacks {missing}")
    return names


def _linear(module: Any) -> LinearPart:
    if type(module) is not nn.Linear:
        raise NotRecognizedError(f"{type(module).__name__} where a Linear is looked for")
    return LinearPart(module.weight.detach(), None if module.bias is None else module.bias.detach())


def _norm(module: Any) -> NormPart:
    """By what it does to random numbers: some norms add 1 to their weight."""
    weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or weight.dim() != 1 or epsilon is None:
        raise NotRecognizedError(f"{type(module).__name__} is no RMSNorm")
    own = weight.detach().float()
    probe = torch.randn((4, len(own)), generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    normalized = probe * torch.rsqrt(probe.pow(2).mean(-1, keepdim=True) + epsilon)
    with torch.inference_mode():
        real = module(probe).float()
    for candidate in (own, own + 1):
        if torch.allclose(real, normalized * candidate, _RTOL, _ATOL):
            return NormPart(candidate.contiguous(), float(epsilon))
    raise NotRecognizedError(f"{type(module).__name__} computes something else than RMSNorm")


def _activation(mlp: Any) -> str:
    function = getattr(mlp, "act_fn", None)
    if function is None:
        raise NotRecognizedError(f"{type(mlp).__name__} has no act_fn")
    grid = torch.linspace(-8, 8, 161)
    with torch.inference_mode():
        real = function(grid)
    known = {"silu": nn.functional.silu(grid), "gelu_tanh": nn.functional.gelu(grid, approximate="tanh")}
    for name, values in known.items():
        if torch.allclose(real, values, _RTOL, _ATOL):
            return name
    raise NotRecognizedError(f"its activation is none of {', '.join(known)}")


def _scale(first_input: Tensor, embedded: Tensor) -> float:
    """What the embedding is multiplied by before the first layer."""
    embedded = embedded.float()
    scale = float((first_input * embedded).sum() / embedded.pow(2).sum().clamp_min(1e-30))
    if not torch.allclose(first_input, embedded * scale, rtol=1e-2, atol=1e-4):
        raise NotRecognizedError("something else than a factor comes between the embedding and the first layer")
    return 1.0 if abs(scale - 1) < 1e-6 else scale


# -------------------------------------------------------------------------------------------------------- observation


@dataclass(slots=True)
class _Observed:
    """What one pass through the model showed."""

    token_ids: Tensor  # [2] int64
    first_input: Tensor  # [2, hidden_size] float32, into the first layer
    rotaries: list[Rotary]
    rotary_of_layer: list[int]
    num_kv_heads: list[int]  # of each layer


def _observe(model: Any, base: Any, layers: nn.ModuleList, hook: AttentionHook) -> _Observed:
    """Where each layer's rotary embedding comes from, and what reaches the first layer."""
    calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]] = []
    entered: list[tuple[Tensor, Any]] = []
    handles = [
        child.register_forward_hook(
            lambda module, args, kwargs, output: calls.append((module, args, kwargs, output)), with_kwargs=True
        )
        for child in base.children()
        if child is not layers
    ]
    handles += [
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: entered.append((args[0], kwargs.get("position_embeddings"))), with_kwargs=True
        )
        for layer in layers
    ]
    token_ids, positions = torch.tensor([1, 2]), torch.tensor([[3, 7]])
    recorder = Recorder()
    try:
        with torch.inference_mode(), hook.during(recorder):
            model(input_ids=token_ids[None], position_ids=positions, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    if len(entered) != len(layers) or any(not isinstance(each, tuple) for _, each in entered):
        raise NotRecognizedError("its layers are not given their rotary embedding")
    sources = [_source(calls, embeddings) for _, embeddings in entered]
    distinct = sorted(set(sources))
    rotaries = [_rotary(*calls[index][:3], positions) for index in distinct]
    num_kv_heads = [layer.num_kv_heads for layer in recorder.geometry]
    indices = [distinct.index(each) for each in sources]
    return _Observed(token_ids, entered[0][0][0].float(), rotaries, indices, num_kv_heads)


def _source(calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]], embeddings: Any) -> int:
    """Index of the call whose output these are."""
    for index, (*_, output) in enumerate(calls):
        if isinstance(output, tuple) and len(output) == 2 and output[0] is embeddings[0]:
            return index
    raise NotRecognizedError("its rotary embeddings come from nowhere that is looked at")


def _rotary(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], seen: Tensor) -> Rotary:
    """The same call with other positions, in float32."""

    def replaced(value: Any, positions: Tensor) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.float() if value.is_floating_point() else positions

    def table(positions: Tensor) -> tuple[Tensor, Tensor]:
        given = positions[None]
        with torch.inference_mode():
            cos, sin = module(
                *(replaced(value, given) for value in args),
                **{name: replaced(value, given) for name, value in kwargs.items()},
            )
        return cos[0].float().contiguous(), sin[0].float().contiguous()

    if len(table(seen[0])[0]) != seen.shape[1]:
        raise NotRecognizedError("its rotary embedding is not one row per position")
    return table
