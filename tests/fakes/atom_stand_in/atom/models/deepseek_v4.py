from atom.utils import envs

SPARSE_INDEXER_LOGITS_BUDGET_MB = getattr(envs, "ATOM_SPARSE_INDEXER_LOGITS_BUDGET_MB", None)
