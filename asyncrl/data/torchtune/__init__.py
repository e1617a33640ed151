"""torchtune configurations read as runs of this project; the command is :mod:`asyncrl.data.from_torchtune`.

Facts about torchtune (names of recipes and builders, defaults of their arguments) are those of its releases 0.4 to 0.6
and of the 0.7 nightlies. Nothing here imports torch or torchtune.
"""
