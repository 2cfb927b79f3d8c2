"""verl's FSDP2 engines with LoRA dropout, compiled layers, and micro-batches within the token budget."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.dropout import _DropoutNd
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel

from raylight.config import LearnerConfig
from raylight.engines.expert_routes import ExpertRoutes
from raylight.errors import ConfigError
from raylight.experience.batches.token_budgets import plan_micro_batches
from raylight.images.model_inputs import ModelImages, auto_class
from raylight.learner import verl_api as verl
from raylight.learner.model.adapter import check_adapter, peft_config
from raylight.learner.model.muon import MuonWithAdamW
from raylight.learner.model.varlen_attention import VARLEN, row_bounds
from raylight.learner.model.vision import ModelVision
from raylight.learner.progress import CLOCK
from raylight.learner.tokens.micro_batch import MicroBatch, activation_bytes, host_tokens, place
from raylight.learner.tokens.response_logprobs import LogprobHead, TargetTokens
from raylight.learner.tokens.rows import Minibatch, TrainRow, mask_all
from raylight.learner.tokens.token_logprobs import TokenDivergence

logger = logging.getLogger(__name__)

Distill = Callable[[MicroBatch], contextlib.AbstractContextManager[TokenDivergence]]
"""Function from a micro-batch to a context with its divergences, in which they can be computed."""
LossFunction = Callable[[dict[str, torch.Tensor], MicroBatch], tuple[torch.Tensor, dict[str, verl.Metric]]]
"""Function from the outputs of a micro-batch, as its matrices, to its loss and metrics."""


class RaylightEngine(verl.FSDPEngineWithLMHead):
    """Engine of the policy or of a reference model.

    Args:
        learner: settings that verl does not have.
        configs: verl's configurations, by name.
    """

    _output = "log_probs"
    """Name of the output that `infer` returns."""
    _auto_class: Any = AutoModelForCausalLM
    """Class of transformers that loads the model."""

    def __init__(self, learner: LearnerConfig, **configs: Any) -> None:
        self._learner, self._is_resident = learner, False
        self._routes: ExpertRoutes | None = None
        self.images: ModelImages | None = None
        """Conversion of images for the model; None for one that reads text alone."""
        self._vision: ModelVision | None = None
        self.keeps_dropout = True
        """True if the model's own dropout is active in training."""
        self.head: LogprobHead
        """Head that makes the model return log-probs; a value model has none."""
        super().__init__(**configs)

    @property
    def device(self) -> torch.device:
        """Device on which the model computes."""
        return torch.device(verl.get_device_id())

    @property
    def collective_device(self) -> torch.device:
        """Device of the tensors that ranks reduce."""
        return self.device

    @property
    def replays_routes(self) -> bool:
        """True if tokens go to the experts that the engine chose."""
        return self._routes is not None

    @property
    def _is_whole(self) -> bool:
        """True if FSDP has nothing to shard, cast or move: one rank in float32 on a CPU.

        Its hooks and its copies of the parameters would take a tenth of the update of a small model.
        """
        return (
            dist.get_world_size() == 1 and self._learner.dtype == "float32" and not torch.cuda.is_available()
        )

    def _build_module(self) -> PreTrainedModel:
        """Load the model in float32, on one rank of those that share it.

        verl's version also replaces methods of transformers and TRL, for vision models and for TRL's classes.
        """
        settings, hf_config = self.model_config, self.model_config.hf_config
        if self.use_ulysses_sp:
            if hasattr(hf_config, "vision_config"):  # verl leaves such a sequence whole
                raise ConfigError(
                    f"learner.ulysses={self.ulysses_sequence_parallel_size} cannot divide the sequences of a "
                    "model with a vision part; remove the setting"
                )
            check_heads(hf_config.get_text_config(), self.ulysses_sequence_parallel_size)
        place_weights = verl.get_init_weight_context_manager(
            use_meta_tensor=not hf_config.tie_word_embeddings, mesh=self.device_mesh
        )
        with place_weights(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loader = self._auto_class if self.images is None else auto_class(reads_images=True)
            if self.images is not None:  # a tower has no packed rows
                hf_config.vision_config._attn_implementation = "sdpa"
            module = loader.from_pretrained(settings.local_path, config=hf_config, dtype=torch.float32)
        module.to(torch.float32)  # transformers loads some parameters in another dtype
        if not self.keeps_dropout:
            disable_dropout(module)
        if settings.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable({"use_reentrant": False})
        return module

    def _build_optimizer(self, module: torch.nn.Module) -> torch.optim.Optimizer:
        config = self.optimizer_config
        if config.optimizer != "Muon":
            return super()._build_optimizer(module)
        assert config.override_optimizer_config is not None
        momentum = config.override_optimizer_config["momentum"]
        return MuonWithAdamW(module, config.lr, config.weight_decay, momentum, config.betas)

    def _build_lr_scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """Build verl's schedule with a warm-up that starts above 0, so that its first step trains."""
        shape = super()._build_lr_scheduler(optimizer).lr_lambdas[0]
        warmup = self.optimizer_config.lr_warmup_steps or 0
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: shape(step + (step < warmup)))

    def _build_lora_module(self, module: PreTrainedModel) -> torch.nn.Module:
        """Wrap the model with peft. verl's version does not support dropout."""
        import peft

        lora = self._learner.lora
        assert lora is not None
        wrapped = peft.get_peft_model(module, peft_config(lora, "CAUSAL_LM", module))
        check_adapter(wrapped, lora)
        return wrapped

    def _add_head(self, module: Any) -> None:
        """Make the model return log-probs instead of logits."""
        model = module.get_base_model() if self._is_lora else module
        self.head = LogprobHead(model)
        self._add_vision(model)
        if self._learner.router_replay:
            self._routes = ExpertRoutes(model)

    def _add_vision(self, model: PreTrainedModel) -> None:
        if self.images is not None:
            is_trained = self._learner.train_vision and not self.engine_config.forward_only
            self._vision = ModelVision(model, self.images, is_trained)

    def _build_fsdp_module(self, module: Any) -> torch.nn.Module:
        forward_only = self.engine_config.forward_only
        self._add_head(module)
        if forward_only:
            module.requires_grad_(False)
        if self._learner.dtype == "bfloat16":
            for param in module.parameters():
                if not param.requires_grad:  # the forward pass would round it in any case
                    param.data = param.data.to(torch.bfloat16)
        if self._learner.torch_compile:
            for layer in list(module.modules()):
                if type(layer).__name__ in (module._no_split_modules or ()):
                    layer.compile(dynamic=True)
        if self._is_whole:
            self._autocast_dtype = torch.float32
            return module
        # verl would wrap an embedding within wrapped embeddings, which FSDP cannot
        layers = [name for name in module._no_split_modules or () if not name.endswith("Embeddings")]
        self.engine_config.wrap_policy["transformer_layer_cls_to_wrap"] = layers
        # verl would offload every forward-only model to pinned host memory, which needs a GPU
        self.engine_config.forward_only = forward_only and self.engine_config.param_offload
        left_whole = contextlib.nullcontext() if self._vision is None else self._vision.left_whole()
        try:
            with left_whole:
                wrapped = super()._build_fsdp_module(module)
        finally:
            self.engine_config.forward_only = forward_only
        if self._vision is not None:
            self._vision.place(self.device)
        return wrapped

    def load_images(self, files: Mapping[str, bytes]) -> None:
        """Take the images of an update, by digest.

        Raises:
            ConfigError: the model reads none.
        """
        if self._vision is not None:
            self._vision.load(files)
        elif files:
            raise ConfigError(
                f"rows have images, and {self.model_config.local_path} reads text alone as "
                f"{type(self).__name__}; use an algorithm without a critic, and a model with a vision part"
            )

    @contextlib.contextmanager
    def resident(self) -> Iterator[None]:
        """Context in which offloaded parameters and optimizer states stay on the device, from one pass or
        step to the next."""
        model, optimizer = self.is_param_offload_enabled, self.is_optimizer_offload_enabled
        if self._is_resident or not (model or optimizer):
            yield
            return
        self.to(verl.get_device_name(), model=model, optimizer=optimizer, grad=model)
        self._is_resident = True
        try:
            yield
        finally:
            self._is_resident = False
            self.to("cpu", model=model, optimizer=optimizer, grad=model)

    def train_mode(self, **options: bool) -> contextlib.AbstractContextManager[object]:
        return super().train_mode(disable_auto_offload=self._is_resident, **options)

    def eval_mode(self, **options: bool) -> contextlib.AbstractContextManager[object]:
        return super().eval_mode(disable_auto_offload=self._is_resident, **options)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move the model and the optimizer. Tensors that are moved to the host can be read there."""
        super().to(device, model=model, optimizer=optimizer, grad=grad)
        if device == "cpu" and torch.cuda.is_available():
            torch.cuda.synchronize()

    def place_optimizer(self) -> None:
        """Move the states of the optimizer to where they are kept between updates."""
        device = "cpu" if self.is_optimizer_offload_enabled else verl.get_device_name()
        self.to(device, model=False, optimizer=True, grad=False)

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Context in which the model computes without its adapter.

        The adapter's parameters keep `requires_grad`, because FSDP2 fixes the trained parameters in its first
        pass.
        """
        trained = [param for param in self.module.parameters() if param.requires_grad]
        with self.module.disable_adapter():
            for param in trained:
                param.requires_grad_(True)
            yield

    def infer(self, rows: list[TrainRow]) -> list[torch.Tensor]:
        """Return each row's outputs, shape (response tokens,), in float32 on the CPU. A collective."""
        return [outputs[self._output] for outputs in self._infer(rows)]

    def infer_with_squares(self, rows: list[TrainRow]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return each row's log-probs and its sums of squared probabilities over the vocabulary, both of
        shape (response tokens,). A collective."""
        found = self._infer(rows, squares=True)
        return [row["log_probs"] for row in found], [row["sum_pi_squared"] for row in found]

    def _infer(self, rows: list[TrainRow], squares: bool = False) -> list[dict[str, torch.Tensor]]:
        """Return all outputs of each row by name, shape (response tokens,)."""
        outputs: list[dict[str, torch.Tensor]] = [{}] * len(rows)
        with self.eval_mode(), torch.no_grad(), self._autocast():
            for indices, batch in self._micro_batches(Minibatch(rows, len(rows)), squares=squares):
                found = {name: matrix.float().cpu() for name, matrix in self._compute(batch).items()}
                for place, index in enumerate(indices):  # an idle pass has no indices
                    length = len(rows[index].response)
                    outputs[index] = {name: matrix[place][:length] for name, matrix in found.items()}
                CLOCK.mark()
        return outputs

    def infer_hidden(self, batch: MicroBatch) -> torch.Tensor:
        """Return the hidden states that predict the sampled tokens of a micro-batch, shape (tokens, hidden
        size). A collective."""
        with self.eval_mode(), torch.no_grad(), self._autocast():
            inputs, _ = self._model_inputs(batch)
            targets = replace(batch.targets(), hidden=True, router_logits=False)
            return self.module(**inputs, sampled=targets, use_cache=False)["hidden"]

    def train(
        self,
        minibatch: Minibatch,
        loss_function: LossFunction,
        *,
        entropy: bool = False,
        entropy_grad: bool = False,
        observations: bool = False,
        distill: Distill | None = None,
    ) -> dict[str, verl.Metric | float]:
        """Take an optimizer step; return the loss function's metrics, each of all micro-batches, and the
        gradient's norm. A collective.

        Args:
            entropy, entropy_grad: compute the entropies, and their gradient.
            observations: compute the log-probs of observed tokens too.
            distill: gives the divergences of a micro-batch from a teacher, which are computed too.
        """
        metrics: dict[str, verl.Metric | float] = {}
        with self.train_mode():
            self.optimizer_zero_grad()
            batches = self._micro_batches(minibatch, entropy, entropy_grad, observations=observations)
            balanced = self._count_real_tokens(minibatch.rows) if self._balances else 0
            for i, (indices, batch) in enumerate(batches):
                is_last = i == len(batches) - 1
                judged = contextlib.nullcontext() if distill is None else distill(batch)
                with self._gradient_sync_context(is_last_micro_batch=is_last), judged as divergence:
                    with self._autocast():
                        outputs = self._compute(batch, divergence)
                        loss, found = loss_function(outputs, batch)
                        if self._balances:
                            balance = self._router_balance(outputs["router_logits"], batch, balanced)
                            loss = loss + self._learner.router_aux_loss_coef * balance
                            found = found | {"router_aux_loss": verl.Metric("sum", balance)}
                    loss.backward()
                if indices:
                    verl.append_to_dict(metrics, found)
                CLOCK.mark()
            return metrics | {"grad_norm": self.optimizer_step()}

    @property
    def _balances(self) -> bool:
        """True if the load of experts is part of the loss."""
        return self._learner.router_aux_loss_coef > 0

    def _count_real_tokens(self, rows: list[TrainRow]) -> int:
        """Return the tokens of all ranks' rows that are trained. A collective."""
        tokens = torch.tensor(
            sum(row.tokens for row in rows if row.mask.any()), device=self.collective_device
        )
        dist.all_reduce(tokens, group=self.get_data_parallel_group())
        return int(tokens)

    def _router_balance(self, logits: torch.Tensor, batch: MicroBatch, tokens: int) -> torch.Tensor:
        """Return a pass's part of the load-balancing loss of a mini-batch. A collective.

        The loads of the experts come from all ranks' passes at the same time.

        Args:
            logits: of the routers, shape (layers, tokens, experts).
            tokens: real tokens of the mini-batch, on all ranks.
        """
        top_k = self.model_config.hf_config.get_text_config().num_experts_per_tok
        probs = logits[:, batch.real_tokens()].flatten(0, 1).softmax(-1)
        chosen = torch.bincount(probs.topk(top_k, -1).indices.flatten(), minlength=logits.shape[-1])
        counts = torch.cat([chosen, chosen.new_tensor([len(probs)])]).to(self.collective_device)
        dist.all_reduce(counts, group=self.get_data_parallel_group())
        loads = (counts[:-1] / counts[-1].clamp(min=1)).to(probs.device)
        share = probs.sum(0) * loads / (len(logits) * max(tokens, 1))
        return share.sum() * logits.shape[-1] * batch.dp_size

    @functools.cached_property
    def _pass_tokens(self) -> int:
        """Limit of the tokens of a pass. On a CPU it also bounds the activations; several ranks would reduce
        their gradients after each pass."""
        limit = self._learner.max_tokens_per_micro_batch * self.ulysses_sequence_parallel_size
        if self.device.type != "cpu" or dist.get_world_size() > 1:
            return limit
        return min(limit, host_tokens(activation_bytes(self.module)))

    def _micro_batches(
        self,
        minibatch: Minibatch,
        entropy: bool = False,
        entropy_grad: bool = False,
        squares: bool = False,
        observations: bool = False,
    ) -> list[tuple[list[int], MicroBatch]]:
        """Divide a mini-batch; return each part with the indices of its rows. A collective.

        A rank with fewer parts than another rank begins with idle passes: it computes one of its rows with an
        empty mask. These parts have no indices.
        """
        rows, learner, group = minibatch.rows, self._learner, self.get_data_parallel_group()
        parts = plan_micro_batches([row.tokens for row in rows], self._pass_tokens, learner.packed)
        observed = [row.observed for row in rows if row.observed is not None]
        counts = [
            torch.cat(masks).sum() if masks else torch.tensor(0)
            for masks in ([row.mask for row in rows], observed)
        ]
        tokens = torch.stack(counts).to(self.collective_device)
        dist.all_reduce(tokens, group=group)
        most = torch.tensor([len(parts), any(row.images for row in rows)], device=self.collective_device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        passes, images = most.tolist()
        make = functools.partial(
            MicroBatch,
            device=self.device,
            packed=learner.packed,
            rollouts=minibatch.rollouts,
            tokens=int(tokens[0]),
            dp_size=self.get_data_parallel_size(),
            has_images=bool(images),
            router_logits=self._balances and torch.is_grad_enabled(),
            entropy=entropy,
            entropy_grad=entropy_grad,
            squares=squares,
            observations=int(tokens[1]) if observations else None,
        )
        found = [(part, make([rows[i] for i in part])) for part in parts]
        idle = make([mask_all(rows[parts[-1][-1]])])
        return [([], idle)] * (passes - len(parts)) + found

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        """Context of verl's passes and losses."""
        if self._autocast_dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self._autocast_dtype)

    def _compute(
        self, batch: MicroBatch, divergence: TokenDivergence | None = None
    ) -> dict[str, torch.Tensor]:
        """Return `log_probs`, and `entropy`, `sum_pi_squared` and `divergence` if they are wanted, of the
        sampled tokens, and of observed ones if they are learned; shape (rows, longest response)."""
        inputs, pad_size = self._model_inputs(batch)
        targets = replace(batch.targets(), divergence=divergence)
        if self._routes is not None:
            self._routes.replay(batch.routes())
        if not self.use_ulysses_sp:
            output = self.module(**inputs, sampled=targets, use_cache=False)
        else:
            own = self._slice_for_rank(targets)
            mine = own.positions[0].to(self.device)
            output = {
                name: self._gather_and_unpad_packed(place(values, mine), pad_size)[targets.positions[0]]
                for name, values in self.module(**inputs, sampled=own, use_cache=False).items()
            }
        routers = {name: output.pop(name) for name in ("router_logits",) if name in output}
        return {name: place(values, batch.computed) for name, values in output.items()} | routers

    def _model_inputs(self, batch: MicroBatch) -> tuple[dict[str, object], int]:
        """Return the model's inputs, and the tokens that pad a packed sequence."""
        padding = 0
        if batch.packed:
            inputs, arguments = self.prepare_model_inputs(batch.packed_inputs())
            padding = arguments["pad_size"]
        else:
            inputs = batch.padded_inputs()
        if self._vision is not None:
            inputs |= self._vision.inputs(batch, inputs["input_ids"])
        if not batch.packed:
            return inputs, 0
        if self.model_config.hf_config._attn_implementation == VARLEN:
            lengths = [row.tokens for row in batch.rows]
            inputs |= row_bounds(lengths + [padding] * (padding > 0), self.device)
        return inputs, padding

    def _slice_for_rank(self, sampled: TargetTokens) -> TargetTokens:
        """Return the sampled tokens in this rank's slice of the sequence."""
        order = sampled.positions.long().cumsum(-1) * sampled.positions  # from 1; 0 for all other tokens
        own = verl.ulysses_pad_and_slice_inputs(order, None, self.ulysses_sequence_parallel_size)[0]
        chosen = (own[own > 0] - 1).to(sampled.targets.device)
        return replace(
            sampled,
            positions=own > 0,
            targets=sampled.targets[chosen],
            temperatures=None if sampled.temperatures is None else sampled.temperatures[chosen],
            replay=None if sampled.replay is None else sampled.replay.select(chosen.cpu().numpy()),
        )


class ValueEngine(RaylightEngine):
    """Engine of the critic: the policy's architecture with a head of one value per token."""

    _output, _auto_class = "values", AutoModelForTokenClassification
    _balances = False

    def _compute(
        self, batch: MicroBatch, divergence: TokenDivergence | None = None
    ) -> dict[str, torch.Tensor]:
        """Return `values`, shape (rows, longest response): the value of the context before each token."""
        inputs, pad_size = self._model_inputs(batch)
        values = self.module(**inputs, use_cache=False).logits.squeeze(-1)
        if batch.packed:
            values = self._gather_and_unpad_packed(values[0], pad_size)[None]
        return {"values": place(values[batch.value_positions()], batch.within)}

    def _add_head(self, module: object) -> None:
        """Keep the model's own head, which computes one value per token."""

    def _build_module(self) -> PreTrainedModel:
        """Build a token classifier as a language model, since verl's value models need flash attention."""
        hf_config = self.model_config.hf_config
        hf_config.num_labels, hf_config.classifier_dropout = 1, 0.0
        return super()._build_module()

    def _build_lora_module(self, module: PreTrainedModel) -> torch.nn.Module:
        """Add the adapter to the base model. The new head is trained in full."""
        import peft

        lora = self._learner.lora
        assert lora is not None
        base = getattr(module, module.base_model_prefix)
        peft.inject_adapter_in_model(peft_config(lora, None, base), base)
        check_adapter(module, lora)
        return module


class RewardEngine(ValueEngine):
    """Engine of a reward model. Its head has no bias, as in `AutoModelForSequenceClassification`, under
    which it is saved."""

    def _build_module(self) -> PreTrainedModel:
        module = super()._build_module()
        head = getattr(module, "score", None)
        if not isinstance(head, torch.nn.Linear):
            raise ConfigError(
                f"{type(module).__name__} has no head of the name `score`, so that it cannot be saved as a "
                "reward model; choose a model of another architecture, such as Qwen or Llama"
            )
        head.register_parameter("bias", None)
        return module


def disable_dropout(module: torch.nn.Module) -> None:
    """Set all dropout probabilities of a model and of its configuration to 0."""
    for part in module.modules():
        if isinstance(part, _DropoutNd):
            part.p = 0.0
        config = getattr(part, "config", None)
        for owner in [part] if config is None else [part, config]:
            names = [
                name for name, value in vars(owner).items() if "drop" in name and isinstance(value, float)
            ]
            for name in names:  # attention reads such attributes
                setattr(owner, name, 0.0)


def check_heads(config: Any, size: int) -> None:
    """Check that the ranks of a sequence can divide the attention heads.

    Args:
        config: transformers' configuration of the language model.
        size: ranks of a sequence.

    Raises:
        ConfigError: they cannot.
    """
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    if heads % size or (keys % size and size % keys):
        raise ConfigError(
            f"learner.ulysses={size} cannot divide {heads} attention heads and {keys} key-value heads; set "
            "it to a divisor of both"
        )
