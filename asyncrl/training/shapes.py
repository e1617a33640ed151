"""Legend of the shape suffixes of tensor names in ``asyncrl.training`` and ``asyncrl.algorithms``.

====  =====================================================================
B     documents (rows) of one attention bucket
D     size of one attention head
E     embedding (hidden) size of the model
G     samples of one group
H     query heads; ``Hk`` key/value heads, ``H = Hk * repeats``
K     key positions that a row of queries may attend to
L     padded length of a bucket's rows
M     predicted tokens of a micro-batch: one per completion token that is scored
N     padded positions of a bucket, ``B * L``
P     prompt tokens
R     ranks
T     tokens of a packed row (the model's input, batch of one), or of one completion in ``rollouts.types``
V     vocabulary
====  =====================================================================

``logits_MV`` is indexed by predicted token, then by vocabulary. A suffix of 1 is a batch axis of size one.
"""
