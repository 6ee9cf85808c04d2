from conformance.plain import Trainer

FAULTS: dict[str, type[Trainer]] = {}
