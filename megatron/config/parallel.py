from megatron.config.training import ParallelConfig as ParallelConfig
