"""Parameters that a graph has only while it uses them: which make up a layer, and nodes that fetch and send them."""
