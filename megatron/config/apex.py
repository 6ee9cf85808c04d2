from megatron.config.pretrain import require_apex as require_apex
