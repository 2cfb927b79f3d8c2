"""verl's FSDP2 engines with what raylight adds: adapters with dropout, compiled layers, micro-batches within the budget."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist

from raylight.config import LearnerConfig, LoraConfig
from raylight.errors import ConfigError
from raylight.experience.token_budgets import plan_micro_batches
from raylight.learner import verl_api as verl
from raylight.learner.response_logprobs import response_logprobs

logger = logging.getLogger(__name__)


class RaylightEngine(verl.FSDPEngineWithLMHead):
    """The policy, or a reference.

    Args:
        learner: settings that verl has no words for.
        configs: verl's own, by name.
    """

    def __init__(self, learner: LearnerConfig, **configs: Any) -> None:
        self._learner = learner
        super().__init__(**configs)

    def _build_lora_module(self, module: Any) -> Any:
        """verl's knows no dropout."""
        import peft

        lora = self._learner.lora
        assert lora is not None
        wrapped = peft.get_peft_model(module, _lora_config(lora, "CAUSAL_LM"))
        _check_adapter(wrapped, lora)
        return wrapped

    def _build_fsdp_module(self, module: Any) -> Any:
        forward_only = self.engine_config.forward_only
        if forward_only:
            module.requires_grad_(False)
        if self._learner.dtype == "bf16":
            for param in module.parameters():
                if not param.requires_grad:  # it is rounded before it is computed with in any case
                    param.data = param.data.to(torch.bfloat16)
        if self._learner.torch_compile:
            for layer in list(module.modules()):
                if type(layer).__name__ in (module._no_split_modules or ()):
                    layer.compile(dynamic=True)
        # verl would keep every forward-only model in pinned memory of the host, which a CPU does not have
        self.engine_config.forward_only = forward_only and self.engine_config.param_offload
        try:
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config.forward_only = forward_only

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """The model as it was before training. The adapter still counts as trained: FSDP2 settles in the first pass what is."""
        trained = [param for param in self.module.parameters() if param.requires_grad]
        with self.module.disable_adapter():
            for param in trained:
                param.requires_grad_(True)
            yield

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False
    ) -> Any:
        """verl's, but for the choice of micro-batches: verl leaves out what padding costs, and fails where a rank has fewer rows
        than another has micro-batches. Such a rank computes one of its rows again, of which nothing is kept or learned."""
        tools, group = verl.tensordict_utils, self.get_data_parallel_group()
        tokens = data["loss_mask"].sum().to(verl.get_device_id())
        dist.all_reduce(tokens, group=group)
        dp_size = self.get_data_parallel_size()
        tools.assign_non_tensor(
            data, sp_size=self.ulysses_sequence_parallel_size, batch_num_tokens=tokens.item(), dp_size=dp_size
        )
        lengths = data["input_ids"].offsets().diff().tolist()
        budget = self._learner.max_tokens_per_micro_batch * self.ulysses_sequence_parallel_size
        parts = plan_micro_batches(lengths, budget, self._learner.packed)
        most = torch.tensor(len(parts), device=verl.get_device_id())
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        idle = int(most) - len(parts)  # passes to take part in, with nothing to compute
        outputs = []
        for i, part in enumerate([parts[-1][-1:]] * idle + parts):
            micro_batch = (
                data if len(part) == len(lengths) and not idle else tools.index_select_tensor_dict(data, part)
            )
            if i < idle:
                for name in ("loss_mask", "response_mask"):
                    micro_batch[name] = torch.zeros_like(micro_batch[name])
            output = self._pass(micro_batch, loss_function, forward_only, last=i == int(most) - 1)
            if i >= idle:
                outputs.append(output)
        return verl.postprocess_batch_func(output_lst=outputs, indices=parts, data=data)

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> Any:
        """verl's computes log-probs of prompts too, and one token at a time where flash attention is not installed."""
        if self.use_ulysses_sp:
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        entropy = verl.tensordict_utils.get_non_tensor_data(
            data=micro_batch, key="calculate_entropy", default=False
        )
        return response_logprobs(output, micro_batch, packed=self._learner.packed, entropy=entropy)

    def _pass(
        self, micro_batch: Any, loss_function: Callable[..., Any], forward_only: bool, last: bool
    ) -> dict[str, Any]:
        with torch.no_grad() if forward_only else self._gradient_sync_context(is_last_micro_batch=last):
            loss, output = self.forward_step(
                micro_batch, loss_function=loss_function, forward_only=forward_only
            )
            if not forward_only:
                loss.backward()
                output.pop("model_output", None)  # it would be held until the last micro-batch
        return output


class ValueEngine(RaylightEngine, verl.FSDPEngineWithValueHead):
    """The critic: the policy's architecture with a head of one number per token."""

    prepare_model_outputs = verl.FSDPEngineWithValueHead.prepare_model_outputs

    def _build_module(self) -> Any:
        """verl's loader of value models insists on flash attention; its loader of language models takes any architecture."""
        model, architecture = self.model_config, self.model_config.hf_config
        architecture.num_labels, architecture.classifier_dropout = 1, 0.0
        architecture.architectures = [
            name.replace("ForCausalLM", "ForTokenClassification") for name in architecture.architectures
        ]
        model.model_type = "language_model"
        try:
            return super()._build_module()
        finally:
            model.model_type = "value_model"

    def _build_lora_module(self, module: Any) -> Any:
        """The head is new, and is trained in full; all else is adapted."""
        import peft

        lora = self._learner.lora
        assert lora is not None
        peft.inject_adapter_in_model(_lora_config(lora, None), getattr(module, module.base_model_prefix))
        _check_adapter(module, lora)
        return module


def _lora_config(lora: LoraConfig, task: str | None) -> Any:
    import peft

    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=cast(Any, lora.alpha),
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        exclude_modules=lora.exclude_modules,
        bias="none",
        task_type=task,
    )


def _check_adapter(module: Any, lora: LoraConfig) -> None:
    """Only what can be merged into the model's weights, exactly and with each of them by itself, is adapted.

    Raises:
        ConfigError: `target_modules` names something else.
    """
    from peft.tuners.lora import Linear, LoraLayer

    tied = module.config.tie_word_embeddings
    for name, layer in module.named_modules():
        if isinstance(layer, LoraLayer) and (
            type(layer) is not Linear or (tied and name.endswith("lm_head"))
        ):
            raise ConfigError(
                f"lora.target_modules={lora.target_modules!r} takes in {name}, which cannot be adapted: only linear layers whose "
                "weights are theirs alone can be; name others, or add it to lora.exclude_modules"
            )
