"""Single errors in `scan`, which its tests must notice."""

NETWORKS, CHECKPOINT = "networks", "sinkscope.models.checkpoint"
MUTATIONS = [
    ("the norm before the network is left out", NETWORKS, "Network.read", "(rows * self.norm).square", "rows.square"),
    ("gate and up are paired the other way", NETWORKS, "Network.read",
     "if self.is_interleaved", "if not self.is_interleaved"),
    ("transposed: the gain of another coordinate", NETWORKS, "Network.read",
     "self.norm[part, None]", "self.norm[: len(rows), None]"),
    ("the norm behind the network is left out", NETWORKS, "Network.written",
     "(entries * self.post[of_rows, None])", "entries"),
    ("the last chunk wins", NETWORKS, "Network.written", "new[0] > best[0, neurons]", "new[0] > -1"),
    ("the coordinate within the chunk", NETWORKS, "Network.written", "of_rows[index]", "index"),
    ("an expert reads the first one's rows", NETWORKS, "Network._rows", "self.part * stored", "0 * stored"),
    ("the bound of a gate alone", NETWORKS, "Network.table", "width ** read.shape[1]", "width"),
    ("a norm's own bound is left out", NETWORKS, "Network.table", "self.post.ne(1).any()", "False"),
    ("attention is taken for a network", NETWORKS, "_of_layer", '"".join(of_gguf.groups(""))', '""'),
    ("gains are the stored numbers", NETWORKS, "_of_layer", "[1][0] + offset", "[1][0]"),
    ("any norm will do", NETWORKS, "_of_layer", 'row.sites.keys() <= norms.keys()', 'row.sites.keys()'),
    ("packed weights are scanned", NETWORKS, "find_networks", "if method := method_of(settings)", "if method := None"),
    ("ranks of the whole model", "command", "scan", 'table.groupby("layer")["gain"]', 'table["gain"]'),
    ("rows are counted from 0 in each chunk", CHECKPOINT, "Stored.rows",
     "self.read(first + part.start", "self.read(part.start"),
    ("the first tensor's place", CHECKPOINT, "_of_safetensors", "start + data_offsets[0]", "start"),
    ("all of a file is taken for a part", CHECKPOINT, "_read_remote", "!= 206", "== 404"),
    ("one byte too much", CHECKPOINT, "_read_remote", "{last - 1}", "{last}"),
]  # fmt: skip
