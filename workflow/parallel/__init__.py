"""How the ranks of a run divide its model and its batches. Pure arithmetic and graph rewrites; runs nothing."""
