"""The gate before the first step: each node computes, copies and exchanges data, and is compared with its peers."""
