"""verl's FSDP2 engines with LoRA dropout, compiled layers, and micro-batches within the token budget."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from raylight.config import LearnerConfig
from raylight.experience.token_budgets import plan_micro_batches
from raylight.learner import verl_api as verl
from raylight.learner.adapter import check_adapter, peft_config
from raylight.learner.progress import CLOCK
from raylight.learner.response_logprobs import LogprobHead, TargetTokens, sampled_tokens, to_nested

logger = logging.getLogger(__name__)


class RaylightEngine(verl.FSDPEngineWithLMHead):
    """Engine of the policy or of a reference model.

    Args:
        learner: settings that verl does not have.
        configs: verl's configurations, by name.
    """

    def __init__(self, learner: LearnerConfig, **configs: Any) -> None:
        self._learner = learner
        super().__init__(**configs)

    @property
    def collective_device(self) -> Any:
        """Device of the tensors that ranks reduce."""
        return verl.get_device_id()

    def _build_lora_module(self, module: Any) -> Any:
        """Wrap the model with peft. verl's version does not support dropout."""
        import peft

        lora = self._learner.lora
        assert lora is not None
        wrapped = peft.get_peft_model(module, peft_config(lora, "CAUSAL_LM", module))
        check_adapter(wrapped, lora)
        return wrapped

    def _add_head(self, module: Any) -> None:
        """Make the model return log-probs instead of logits."""
        LogprobHead(module.get_base_model() if self._is_lora else module)

    def _build_fsdp_module(self, module: Any) -> Any:
        forward_only = self.engine_config.forward_only
        self._add_head(module)
        if forward_only:
            module.requires_grad_(False)
        if self._learner.dtype == "bf16":
            for param in module.parameters():
                if not param.requires_grad:  # the forward pass would round it in any case
                    param.data = param.data.to(torch.bfloat16)
        if self._learner.torch_compile:
            for layer in list(module.modules()):
                if type(layer).__name__ in (module._no_split_modules or ()):
                    layer.compile(dynamic=True)
        # verl would offload every forward-only model to pinned host memory, which needs a GPU
        self.engine_config.forward_only = forward_only and self.engine_config.param_offload
        try:
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config.forward_only = forward_only

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

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False
    ) -> Any:
        """Run a batch as verl does, but with raylight's micro-batches.

        verl ignores the cost of padding, and fails if a rank has fewer rows than another rank has
        micro-batches. Such a rank computes one of its rows again with an empty mask, and the result is
        dropped.
        """
        tools, group = verl.tensordict_utils, self.get_data_parallel_group()
        tokens = data["loss_mask"].sum().to(self.collective_device)
        dist.all_reduce(tokens, group=group)
        dp_size = self.get_data_parallel_size()
        tools.assign_non_tensor(
            data, sp_size=self.ulysses_sequence_parallel_size, batch_num_tokens=tokens.item(), dp_size=dp_size
        )
        lengths = data["input_ids"].offsets().diff().tolist()
        budget = self._learner.max_tokens_per_micro_batch * self.ulysses_sequence_parallel_size
        parts = plan_micro_batches(lengths, budget, self._learner.packed)
        passes = torch.tensor(len(parts), device=self.collective_device)
        dist.all_reduce(passes, op=dist.ReduceOp.MAX, group=group)
        idle = int(passes) - len(parts)  # collective passes without rows of this rank
        outputs = []
        for i, part in enumerate([parts[-1][-1:]] * idle + parts):
            micro_batch = (
                data if len(part) == len(lengths) and not idle else tools.index_select_tensor_dict(data, part)
            )
            if i < idle:
                for name in ("loss_mask", "response_mask"):
                    micro_batch[name] = torch.zeros_like(micro_batch[name])
            syncs = self._gradient_sync_context(is_last_micro_batch=i == int(passes) - 1)
            with torch.no_grad() if forward_only else syncs:
                loss, output = self.forward_step(
                    micro_batch, loss_function=loss_function, forward_only=forward_only
                )
                if not forward_only:
                    loss.backward()
                    output.pop("model_output", None)  # else it stays in memory until the last micro-batch
            if i >= idle:
                outputs.append(output)
            CLOCK.mark()
        return verl.postprocess_batch_func(output_lst=outputs, indices=parts, data=data)

    def prepare_model_inputs(self, micro_batch: Any) -> Any:
        """Add the sampled tokens, whose log-probs the model returns instead of logits."""
        inputs, arguments = super().prepare_model_inputs(micro_batch)
        wanted = {
            name: verl.tensordict_utils.get_non_tensor_data(data=micro_batch, key=key, default=False)
            for name, key in (("entropy", "calculate_entropy"), ("entropy_grad", "entropy_grad"))
        }
        sampled = sampled_tokens(micro_batch, packed=self._learner.packed, **wanted)
        if self.use_ulysses_sp:
            sampled = self._slice_for_rank(sampled)
        return inputs | {"sampled": sampled}, arguments | {"sampled": sampled}

    def _slice_for_rank(self, sampled: TargetTokens) -> TargetTokens:
        """Return the sampled tokens in this rank's slice of the sequence."""
        order = sampled.positions.long().cumsum(-1) * sampled.positions  # from 1; 0 for all other tokens
        own = verl.ulysses_pad_and_slice_inputs(order, None, self.ulysses_sequence_parallel_size)[0]
        chosen = own[own > 0] - 1
        return replace(
            sampled,
            positions=own > 0,
            targets=sampled.targets[chosen],
            temperatures=None if sampled.temperatures is None else sampled.temperatures[chosen],
        )

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> Any:
        """Return the log-probs and entropies of sampled tokens in verl's layout."""
        if not self.use_ulysses_sp:
            return {name: to_nested(values, micro_batch) for name, values in output.items()}
        own = output_args["sampled"].positions[0]
        return {
            name: torch.nested.nested_tensor_from_jagged(
                self._gather_and_unpad_packed(
                    values.new_zeros(own.shape).masked_scatter(own, values), output_args["pad_size"]
                ),
                micro_batch["input_ids"].offsets(),
            )
            for name, values in output.items()
        }


class ValueEngine(RaylightEngine, verl.FSDPEngineWithValueHead):
    """Engine of the critic: the policy's architecture with a head of one value per token."""

    prepare_model_inputs = verl.FSDPEngineWithValueHead.prepare_model_inputs
    prepare_model_outputs = verl.FSDPEngineWithValueHead.prepare_model_outputs

    def _add_head(self, module: Any) -> None:
        """Keep the model's own head, which computes one value per token."""

    def _build_module(self) -> Any:
        """Build a token classifier as a language model, since verl's value models need flash attention."""
        model_config, hf_config = self.model_config, self.model_config.hf_config
        hf_config.num_labels, hf_config.classifier_dropout = 1, 0.0
        hf_config.architectures = [
            name.replace("ForCausalLM", "ForTokenClassification") for name in hf_config.architectures
        ]
        model_config.model_type = "language_model"
        try:
            return super()._build_module()
        finally:
            model_config.model_type = "value_model"

    def _build_lora_module(self, module: Any) -> Any:
        """Add the adapter to the base model. The new head is trained in full."""
        import peft

        lora = self._learner.lora
        assert lora is not None
        base = getattr(module, module.base_model_prefix)
        peft.inject_adapter_in_model(peft_config(lora, None, base), base)
        check_adapter(module, lora)
        return module
