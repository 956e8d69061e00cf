"""Draw the ten pictures of the project, and write them as SVG files.

    python assets/pictures.py             write the pictures to the folder assets/
    python assets/pictures.py FOLDER      write the pictures to another folder

The functions that a picture explains also compute its content. For example, the picture
of span corruption shows the result of data.span_corruption. If you change one of these
functions, run this script again. A test draws all pictures and compares them with the
files in assets/.

The unit of all coordinates is one pixel. Every picture is 830 pixels wide, which is the
width of README.md on GitHub, and has a light background of its own.
"""

import dataclasses
import functools
import html
import sys
import tempfile
import textwrap
import unittest.mock
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

import configs
import data
import infer
import model
import partition
import train

WIDTH = 830
BLACK, GRAY, LIGHT, WHITE = "#222222", "#5f6368", "#d9dce0", "#ffffff"
BLUE, ORANGE, GREEN, PURPLE = "#2f6db3", "#c8581a", "#2c8a4b", "#8a4fa3"
# PALE maps each color to a lighter version of this color. The lighter colors fill boxes,
# because black text is readable on them.
PALE = {
    BLUE: "#d3e3f5",
    ORANGE: "#fbdcc4",
    GREEN: "#d0ecd8",
    PURPLE: "#e7d8ef",
    GRAY: "#e9ebee",
}


# ---- a picture is a list of SVG elements -----------------------------------------------


def number(x):
    """Convert a coordinate to text with at most one decimal, such as "12.5" or "7"."""
    return f"{round(float(x), 1) + 0.0:.1f}".removesuffix(".0")


class Picture:
    """Collect the SVG elements of one picture.

    Most methods, such as `line` and `text`, add elements to the picture. The method `svg`
    returns the picture as the text of an SVG file.

    title: the heading of the picture.
    caption: one line of text below the heading.
    height: the height of the picture in pixels.
    """

    def __init__(self, title, caption, height):
        self.title = title
        self.height = height
        self.elements = []
        self.text(20, 32, title, size=17, bold=True)
        self.text(20, 54, caption, color=GRAY)

    def add(self, name, **attributes):
        """Add one SVG element, such as <rect x="5" y="5" width="20" height="9"/>.

        The call add("rect", x=5, y=5, width=20, height=9) adds this example. An
        underscore in the name of an attribute becomes a hyphen, so stroke_width becomes
        stroke-width. An attribute with the value None is left out.
        """
        words = [f"<{name}"]
        for key, value in attributes.items():
            if value is not None:
                value = value if isinstance(value, str) else number(value)
                words.append(f'{key.replace("_", "-")}="{value}"')
        self.elements.append(" ".join(words) + "/>")

    def rect(self, x, y, width, height, **look):
        """Draw a rectangle whose upper left corner is the point (x, y).

        look: further SVG attributes of the rectangle, such as fill="#ffffff".
        """
        self.add("rect", x=x, y=y, width=width, height=height, **look)

    def text(
        self,
        x,
        y,
        text,
        size=13,
        anchor="start",
        color=None,
        bold=False,
        mono=False,
        angle=0,
        fit=None,
    ):
        """Write one line of text at the point (x, y).

        The letters stand on a horizontal line at the height y, which is called the
        baseline.

        anchor: "start", "middle" or "end". This part of the text has the coordinate x.
        mono: whether to use a font in which all letters have the same width.
        angle: the angle by which the text is rotated, in degrees.
        fit: the width to which the text is stretched or shrunk, or None.
        """
        attributes = f'x="{number(x)}" y="{number(y)}"'
        if size != 13:
            attributes += f' font-size="{size}"'
        if anchor != "start":
            attributes += f' text-anchor="{anchor}"'
        if color:
            attributes += f' fill="{color}"'
        if bold:
            attributes += ' font-weight="bold"'
        if mono:
            attributes += ' font-family="Menlo, Consolas, monospace"'
        if fit:
            attributes += f' textLength="{number(fit)}" lengthAdjust="spacingAndGlyphs"'
        if angle:
            attributes += f' transform="rotate({angle} {number(x)} {number(y)})"'
        self.elements.append(f"<text {attributes}>{html.escape(text, False)}</text>")

    def box(
        self, x, y, width, height, text="", color=GRAY, size=12, strong=False, **more
    ):
        """Draw a box with a text in its center.

        strong: whether to draw a thick border and bold text.
        """
        more = {"fill": PALE[color], "stroke": color, "rx": 3, **more}
        self.rect(x, y, width, height, stroke_width="2.5" if strong else None, **more)
        if text:
            baseline = y + height / 2 + 0.36 * size
            # A long text may be wider than the box in some fonts. Therefore a long text
            # is shrunk or stretched to the width of the box, with a small margin.
            fit = width - 8 if 0.53 * size * len(text) > width - 8 else None
            middle = x + width / 2
            self.text(middle, baseline, text, size, "middle", bold=strong, fit=fit)

    def line(self, *points, color=GRAY, width=1.5, dash=None, arrow=False):
        """Draw a line through several points (x, y).

        If `arrow` is True, the line ends with an arrowhead at the last point.

        dash: the lengths of dashes and gaps, such as "4 3", or None for a solid line.
        """
        path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self.add(
            "polyline",
            points=path,
            fill="none",
            stroke=color,
            stroke_width=str(width),
            stroke_dasharray=dash,
        )
        if arrow:
            (x0, y0), (x, y) = points[-2:]
            length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
            # The vector (a, b) points in the direction of the arrow. Its length of 7
            # pixels is the length of the arrowhead.
            a, b = 7 * (x - x0) / length, 7 * (y - y0) / length
            corners = [
                (x, y),
                (x - a - b / 2, y - b + a / 2),
                (x - a + b / 2, y - b - a / 2),
            ]
            head = " ".join(f"{number(x)},{number(y)}" for x, y in corners)
            self.add("polygon", points=head, fill=color)

    def paragraph(self, y, text):
        """Write a text in several lines, and return the y coordinate of the next line.

        y: the baseline of the first line.
        """
        for line in textwrap.wrap(text, 118, break_on_hyphens=False):
            self.text(20, y, line, 12)
            y += 18
        return y

    def cells(self, x, y, values, cell, colors, gap=1):
        """Draw a matrix of integers as small squares, with one color for each integer.

        values: the matrix. The integer i is drawn in the color colors[i].
        """
        for value, color in enumerate(colors):
            path = "".join(
                f"M{number(x + cell * column)} {number(y + cell * row)}"
                f"h{number(cell - gap)}v{number(cell - gap)}h{number(gap - cell)}z"
                for row, column in np.argwhere(np.asarray(values) == value)
            )
            if path:
                self.elements.append(f'<path fill="{color}" d="{path}"/>')

    def legend(self, x, y, items):
        """Draw a legend, which explains what the colors in the picture mean.

        items: a list of tuples (color, meaning), such as ("#2f6db3", "example 1").
        """
        for color, text in items:
            self.rect(x, y - 10, 12, 12, fill=color, stroke=GRAY)
            self.text(x + 18, y, text, 12)
            x += 34 + 6.6 * len(text)

    def svg(self):
        """Return the picture as the text of an SVG file."""
        head = (
            '<svg xmlns="http://www.w3.org/2000/svg" '
            f'viewBox="0 0 {WIDTH} {self.height}" '
            f'width="{WIDTH}" height="{self.height}" font-size="13" fill="{BLACK}" '
            'font-family="Helvetica, Arial, Liberation Sans, sans-serif" role="img">\n'
            f"<title>{html.escape(self.title)}</title>\n"
            f'<rect x="1" y="1" width="{WIDTH - 2}" height="{self.height - 2}" rx="8" '
            'fill="#fcfcfb" stroke="#c9ccd1"/>\n'
        )
        return head + "\n".join(self.elements) + "\n</svg>\n"


# ---- the example of most pictures ------------------------------------------------------

WORDS = "Thank you for inviting me to your party last week".split()
SENTINELS = 99, 98  # <extra_id_0> and <extra_id_1>
# NAMES maps each token id of the example to the text that stands for this token.
NAMES = {
    data.PAD: "start",
    data.EOS: "EOS",
    99: "<extra_id_0>",
    98: "<extra_id_1>",
    **dict(enumerate(WORDS, 10)),
}


def corrupted_example():
    """Apply span corruption to the sentence that README.md uses as an example.

    Span corruption replaces spans of tokens in the inputs by special tokens, called
    sentinels. The targets contain the removed spans. The function returns three arrays of
    token ids: the tokens of the sentence, the inputs and the targets.
    """
    tokens = np.arange(10, 10 + len(WORDS))
    settings = configs.DataConfig(noise_density=0.4, mean_span_length=2)
    inputs, targets = data.span_corruption(
        tokens[None], np.array([0]), SENTINELS[0], settings
    )
    return tokens, inputs[0], targets[0]


def one_row(inputs, targets):
    """Return a data.Batch with a single row, which holds one example without padding.

    inputs, targets: the token ids of the example.
    """
    limits = len(inputs), len(targets)
    return data.fill_rows([(inputs, targets)], np.array([0]), 1, limits)


def short(token):
    """Return a short text for a token id. For example, <extra_id_0> becomes <0>."""
    return NAMES[token].replace("extra_id_", "")


# ---- span corruption -------------------------------------------------------------------


def span_corruption():
    """Draw how span corruption turns the tokens of a sentence into inputs and targets."""
    tokens, inputs, targets = corrupted_example()
    picture = Picture(
        "Span corruption: from a text to the inputs and the targets",
        "Each removed span has its own color. The number below a token is its id.",
        478,
    )
    step, left = 72, 20
    # Choose a color for each token id in the targets. All tokens of a removed span get
    # the same color as the sentinel that replaces the span.
    color, span_color = {}, GRAY
    for token in targets[:-1].tolist():
        if token in SENTINELS:
            span_color = BLUE if token == SENTINELS[0] else ORANGE
        color[token] = span_color

    def token_box(column, y, token, columns=1):
        x, width = left + step * column, step * columns - 4
        is_sentinel = token in SENTINELS
        size = 11 if is_sentinel and columns == 1 else 12
        picture.box(x, y, width, 26, NAMES[token], color.get(token, GRAY), size)
        picture.text(x + width / 2, y + 40, str(token), 11, "middle", GRAY)

    picture.text(left, 88, "Text", bold=True)
    for column, token in enumerate(tokens.tolist()):
        token_box(column, 96, token)

    picture.text(left, 168, "Inputs", bold=True)
    picture.text(left + 62, 168, "One sentinel replaces each removed span.", 12)
    place = {token: i for i, token in enumerate(tokens.tolist())}
    column = 0
    for token in inputs.tolist():
        # Draw a sentinel as wide as the span of tokens that it replaces.
        width = 1
        if token in SENTINELS:
            width = sum(color.get(t) == color[token] for t in tokens.tolist())
        token_box(column, 176, token, width)
        column += width

    picture.text(left, 248, "Targets", bold=True)
    note = (
        "Each sentinel, followed by the tokens that it replaced. EOS ends every sequence."
    )
    picture.text(left + 62, 248, note, 12)
    for i, token in enumerate(targets.tolist()):
        if token in SENTINELS:
            column = place[targets[i + 1]] - 1
        else:
            column = place.get(token, len(tokens))
        token_box(column, 256, token)

    batch = one_row(inputs, targets)
    picture.text(left, 332, "In the decoder", bold=True)
    note = "The targets are shifted right by one position. At each position, the decoder"
    picture.text(left + 120, 332, note, 12)
    note = "reads one token, sees all tokens to the left, and predicts the token below."
    picture.text(left + 120, 349, note, 12)
    picture.text(left, 385, "decoder inputs", 12)
    picture.text(left, 438, "targets", 12)
    for column, (read, target) in enumerate(zip(batch.decoder_inputs[0], targets)):
        x = left + 120 + step * column
        for y, token in ((367, int(read)), (420, int(target))):
            size = 11 if token in SENTINELS else 12
            picture.box(x, y, step - 4, 26, NAMES[token], color.get(token, GRAY), size)
        picture.line((x + 34, 395), (x + 34, 418), arrow=True)
    settings = (
        "Here 40 % of the tokens are removed. T5 removes 15 %, in spans of 3 tokens."
    )
    picture.text(left, 466, settings, 11, color=GRAY)
    return picture


# ---- encoder, decoder and their attention masks ----------------------------------------


def draw_mask(picture, x, y, mask, cell, colors, queries, keys, size=11):
    """Draw an attention mask as a matrix of squares.

    Each row is a query, and each column is a key. The color of a square shows whether the
    query may attend to the key.

    x, y: the upper left corner of the matrix.
    mask: an array [queries, keys] of indices into `colors`.
    cell: the width of a square in pixels.
    queries, keys: the texts of the rows and of the columns.
    """
    picture.cells(x, y, mask, cell, colors)
    for row, name in enumerate(queries):
        picture.text(x - 5, y + cell * row + cell / 2 + 3.5, name, size, "end")
    for column, name in enumerate(keys):
        x_text = x + cell * column + cell / 2 + 3.5
        picture.text(x_text, y - 5, name, size, angle=-90)


def attention():
    """Draw the layers of the encoder and the decoder, and the three attention masks."""
    _, inputs, targets = corrupted_example()
    batch = one_row(inputs, targets)
    cfg = configs.RECIPES["small_c4"].model
    table = model.param_table(cfg)
    picture = Picture(
        "Encoder and decoder, and their three attentions",
        f"T5 1.1 small has {cfg.num_layers} encoder layers and {cfg.num_decoder_layers} "
        "decoder layers. A mask says which keys each query may see.",
        572,
    )
    colors = {
        "attention": BLUE,
        "self_attention": ORANGE,
        "cross_attention": GREEN,
        "mlp": GRAY,
    }
    titles = {
        "attention": ("self-attention", "of the encoder"),
        "self_attention": ("self-attention", "of the decoder"),
        "cross_attention": ("cross-attention", ""),
        "mlp": ("MLP", ""),
    }

    def two_lines(x, y, width, height, lines, color):
        lines = [line for line in lines if line]
        picture.box(x, y, width, height, color=color)
        for i, line in enumerate(lines):
            baseline = y + height / 2 + 4.5 + 16 * (i - (len(lines) - 1) / 2)
            picture.text(x + width / 2, baseline, line, 12, "middle")

    cross = None
    for stack, y in (("encoder", 86), ("decoder", 190)):
        layers = table[stack]["layers"]
        depth = cfg.num_layers if stack == "encoder" else cfg.num_decoder_layers
        first = ("embeddings", "of the inputs")
        if stack == "decoder":
            first = ("embeddings of", "decoder inputs")
        two_lines(20, y, 104, 44, first, GRAY)
        x = 150
        blocks = [name for name in titles if name in layers]
        assert len(blocks) == len(layers), "a block of the layer is missing"
        width = 18 + sum(112 if "attention" in name else 62 for name in blocks)
        width += 18 * (len(blocks) - 1)
        picture.rect(
            x, y - 12, width, 80, rx=5, fill="none", stroke=GRAY, stroke_dasharray="4 3"
        )
        label = f"{depth} {stack} layers, one after another"
        picture.text(x + 9, y + 61, label, 11, color=GRAY)
        picture.line((124, y + 22), (x + 8, y + 22), arrow=True)
        x += 9
        for i, name in enumerate(blocks):
            block = 112 if "attention" in name else 62
            two_lines(x, y, block, 44, titles[name], colors[name])
            if name == "cross_attention":
                cross = x + block / 2
            if i + 1 < len(blocks):
                picture.line((x + block, y + 22), (x + block + 17, y + 22), arrow=True)
            x += block + 18
        if stack == "encoder":
            picture.line((x - 18, y + 22), (588, y + 22), arrow=True)
            two_lines(588, y, 120, 44, ("output: a vector", "for each input"), GREEN)
            output = (648, y + 44)
        else:
            picture.line((x - 18, y + 22), (587, y + 22), arrow=True)
            two_lines(588, y, 120, 44, ("logits of the", "next token"), GRAY)
    y = 166
    picture.line(
        output, (output[0], y), (cross, y), (cross, 189), color=GREEN, arrow=True
    )
    picture.text(output[0] + 8, 156, "keys and values", 12, color=GREEN)

    # Each tuple in `masks` has the arguments of model.attention_mask and the color of one
    # mask. The arguments are the segments (numbers of examples) of the queries, the
    # segments of the keys, and whether the mask is causal.
    segments, target_segments = batch.input_segments, batch.target_segments
    masks = [
        (segments, segments, False, BLUE),
        (target_segments, target_segments, True, ORANGE),
        (target_segments, segments, False, GREEN),
    ]
    heads = ["Self-attention of the encoder", "Self-attention of the decoder"]
    heads.append("Cross-attention")
    notes = [
        ("Each input sees all inputs,", "to the left and to the right."),
        ("Each position sees itself and", "earlier positions: it is causal."),
        ("Each decoder position sees", "all outputs of the encoder."),
    ]
    names = [short(int(token)) for token in inputs]
    decoder_names = [short(int(token)) for token in batch.decoder_inputs[0]]
    sides = [(names, names), (decoder_names, decoder_names), (decoder_names, names)]
    cell = 18
    for x, mask, (queries, keys), head, note in zip(
        (20, 305, 560), masks, sides, heads, notes
    ):
        *query_and_key, causal, color = mask
        seen = np.asarray(model.attention_mask(*query_and_key, causal))[0, 0]
        picture.text(x, 290, head, bold=True)
        for i, line in enumerate(note):
            picture.text(x, 308 + 16 * i, line, 12)
        draw_mask(
            picture, x + 60, 392, seen.astype(int), cell, (LIGHT, color), queries, keys
        )
    text = (
        "Rows are queries, columns are keys. Dark: the query sees the key. Light: masked."
    )
    picture.text(290, 554, text, 12)
    picture.text(290, 538, "<0> and <1> are the sentinels.", 12)
    return picture


# ---- relative positions ----------------------------------------------------------------


def buckets():
    """Draw the buckets of relative positions in the encoder and in the decoder.

    T5 learns one attention bias for each bucket, which holds one or more positions.
    """
    cfg = configs.RECIPES["small_c4"].model
    far = cfg.relative_max_distance
    picture = Picture(
        "Buckets of relative positions",
        "A relative position is the position of the key minus the position of the query. "
        "Each head learns one bias for each bucket.",
        510,
    )
    sides = [("Encoder", True, BLUE), ("Decoder", False, ORANGE)]
    picture.text(20, 86, "Near the query", bold=True)
    near = np.arange(-14, 15)
    left, step = 106, 24
    picture.text(20, 113, "key − query", 12)
    for i, distance in enumerate(near.tolist()):
        label = str(distance).replace("-", "−")
        picture.text(left + step * i + 11, 113, label, 11, "middle")
    counts = {}
    for row, (name, bidirectional, color) in enumerate(sides):
        y = 122 + 32 * row
        picture.text(20, y + 18, name, 12, color=color, bold=True)
        everywhere = np.arange(-1000, 1001 if bidirectional else 1)
        all_buckets = model.relative_bucket(everywhere, bidirectional, cfg)
        shared = np.bincount(all_buckets) > 1
        # Count the buckets for keys at or before the position of the query, and the
        # buckets for keys after the query. The last bucket contains all keys that are at
        # least `last` positions before the query.
        before = len(np.unique(all_buckets[everywhere <= 0]))
        after = len(np.unique(all_buckets[everywhere > 0]))
        last = -int(everywhere[all_buckets == all_buckets[0]].max())
        counts[name] = before, after, last
        near_buckets = model.relative_bucket(near, bidirectional, cfg)
        for i, (distance, bucket) in enumerate(zip(near, near_buckets.tolist())):
            masked = distance > 0 and not bidirectional
            look = {"fill": WHITE, "stroke": LIGHT} if masked else {}
            if shared[bucket] and not masked:
                look = {"fill": color, "stroke": WHITE}
            text = "" if masked else str(bucket)
            x = left + step * i
            picture.box(x, y, step - 1, 26, color=color, rx=1, **look)
            fill = WHITE if shared[bucket] and not masked else None
            picture.text(x + 11, y + 17, text, 11, "middle", fill)
    picture.legend(
        left,
        202,
        [
            (PALE[BLUE], "one position has its own bucket"),
            (BLUE, "several positions share a bucket"),
            (WHITE, "masked in the decoder"),
        ],
    )

    # Plot the number of the bucket against the relative position. The curve looks like a
    # staircase, in which each stair is one bucket.
    picture.text(20, 240, "All positions", bold=True)
    x0, y0, width, height = 70, 455, 720, 190
    reach = far + 22

    def place(distance, bucket):
        return (
            x0 + width * (distance + reach) / (2 * reach),
            y0 - height * bucket / cfg.relative_buckets,
        )

    for bucket in range(0, cfg.relative_buckets + 1, 8):
        y = place(0, bucket)[1]
        picture.line((x0, y), (x0 + width, y), color=LIGHT, width=1)
        picture.text(x0 - 8, y + 4, str(bucket), 12, "end")
    for distance in range(-far, far + 1, far // 4):
        x = place(distance, 0)[0]
        picture.line((x, y0), (x, y0 + 5), color=GRAY, width=1)
        label = str(distance).replace("-", "−")
        picture.text(x, y0 + 19, label, 12, "middle")
    x = place(0, 0)[0]
    picture.line((x, y0), (x, y0 - height), color=GRAY, width=1, dash="3 3")
    picture.text(32, y0 - height / 2, "bucket", 12, "middle", angle=-90)
    axis = "relative position (key − query), in tokens"
    picture.text(x0 + width / 2, y0 + 40, axis, 12, "middle")
    for name, bidirectional, color in sides:
        distances = np.arange(-reach, reach + 1 if bidirectional else 1)
        found = model.relative_bucket(distances, bidirectional, cfg)
        runs = np.flatnonzero(np.diff(found)) + 1
        points = []
        for start, stop in zip([0, *runs], [*runs, len(distances)]):
            bucket = int(found[start])
            points += [place(distances[start] - 0.5, bucket)]
            points += [place(distances[stop - 1] + 0.5, bucket)]
        picture.line(*points, color=color, width=2)
    (before, after, last), (all_before, _, decoder_last) = counts.values()
    notes = [
        (-reach + 3, 20.8, "Decoder: the query itself and", ORANGE),
        (-reach + 3, 18.5, f"keys before it, in {all_before} buckets", ORANGE),
        (-reach + 3, 11.0, f"Encoder: {before} buckets for the", BLUE),
        (-reach + 3, 8.7, "query itself and keys before it ...", BLUE),
        (48, 21.4, f"... and {after} for keys after it", BLUE),
        (48, 19.1, "(bucket 16 is never used)", BLUE),
        (14, 8.6, "Small distances have buckets of their own.", None),
        (14, 6.3, "Larger distances share buckets. The last bucket", None),
        (14, 4.0, f"holds all distances of {last} or more in the encoder,", None),
        (14, 1.7, f"and of {decoder_last} or more in the decoder.", None),
    ]
    for distance, bucket, text, color in notes:
        x, y = place(distance, bucket)
        # Hide the grid lines behind the text. A rectangle in the color of the background
        # covers these lines.
        picture.rect(x, y - 10, 5.4 * len(text), 13, fill="#fcfcfb")
        picture.text(x, y, text, 12, color=color)
    assert 16 not in model.relative_bucket(np.arange(-far, far), True, cfg)
    return picture


# ---- packing ---------------------------------------------------------------------------

PAIRS = [
    ("good morning", "guten Morgen"),
    ("where is the station", "wo ist der Bahnhof"),
    ("thank you", "danke"),
]


def packed():
    """Draw the arrays and the attention masks of a packed row with three examples."""
    names = {data.PAD: "0", data.EOS: "EOS"}

    def ids(text):
        for word in text.split():
            names.setdefault(len(names) + 8, word)
        lookup = {word: token for token, word in names.items()}
        return np.array([*(lookup[word] for word in text.split()), data.EOS])

    examples = [(ids(inputs), ids(targets)) for inputs, targets in PAIRS]
    limits = 13, 12
    sizes = np.array([[len(side) for side in pair] for pair in examples]).T
    assert len([*data.pack(sizes, limits)]) == 1, "the examples must fit in one row"
    batch = data.fill_rows(examples, np.zeros(len(examples), int), 1, limits)
    picture = Picture(
        "A packed row: three short examples share one row of a batch",
        "Segments number the examples of a row from 1. Padding has segment 0. "
        "A query sees only keys of its own segment.",
        640,
    )
    colors = [GRAY, BLUE, ORANGE, GREEN]
    left, step, y = 138, 52, 76
    side = {"inputs": batch.input_segments, "input_segments": batch.input_segments}
    for name, array in batch._asdict().items():
        segments = side.get(name, batch.target_segments)[0].tolist()
        picture.text(20, y + 17, name, 12, mono=True)
        for i, (value, segment) in enumerate(zip(array[0].tolist(), segments)):
            text = str(value) if "segments" in name else names[value]
            if name == "decoder_inputs" and value == data.PAD and segment:
                text = "start"
            size = 11
            picture.box(left + step * i, y, step - 3, 24, text, colors[segment], size)
        y += 29 if name != "input_segments" else 41
    y += 12

    tokens = {
        "inputs": [names[i] for i in batch.inputs[0].tolist()],
        "decoder": [names[i] for i in batch.decoder_inputs[0].tolist()],
    }
    for name, segments in (
        ("inputs", batch.input_segments[0]),
        ("decoder", batch.target_segments[0]),
    ):
        for i, segment in enumerate(segments):
            if not segment:
                tokens[name][i] = "padding"
            elif tokens[name][i] == "0":
                tokens[name][i] = "start"
    masks = [
        ("Self-attention of the encoder", "inputs", "inputs", False, 20),
        ("Self-attention of the decoder", "decoder", "decoder", True, 298),
        ("Cross-attention", "decoder", "inputs", False, 564),
    ]
    segments_of = {"inputs": batch.input_segments, "decoder": batch.target_segments}
    cell = 15
    for title, query, key, causal, x in masks:
        seen = model.attention_mask(segments_of[query], segments_of[key], causal)
        # If a query sees a key, their square gets the color of the query's segment (the
        # number of its example). All other squares get the color with the index 4, which
        # means "masked".
        value = np.where(np.asarray(seen)[0, 0], segments_of[query][0][:, None], 4)
        picture.text(x, y + 8, title, bold=True)
        strong = ("#a5abb3", BLUE, ORANGE, GREEN, "#eef0f2")
        draw_mask(
            picture, x + 56, y + 76, value, cell, strong, tokens[query], tokens[key]
        )
    y += 76 + 13 * cell + 22
    picture.legend(
        20,
        y,
        [
            (BLUE, "example 1"),
            (ORANGE, "example 2"),
            (GREEN, "example 3"),
            ("#a5abb3", "padding sees only padding"),
            ("#eef0f2", "masked"),
        ],
    )
    y += 24
    text = (
        "Rows of a mask are queries, and columns are keys. In the decoder, a query also "
    )
    picture.text(20, y, text + "sees no later position.", 12)
    text = (
        "The result of each example is the same as in a row of its own. The loss ignores "
    )
    picture.text(20, y + 18, text + "padding.", 12)
    picture.height = y + 36
    return picture


# ---- Adafactor -------------------------------------------------------------------------


def random_normal(*shape, seed):
    """Return random numbers from a normal distribution with mean 0 and variance 1.

    The Box-Muller transform computes the numbers from uniformly distributed random bits.
    Equal seeds give equal numbers, so that the pictures stay the same.
    """
    bits = data.random_bits(seed, np.arange(2 * np.prod(shape)))
    first, second = ((bits >> 11) + 1).astype(np.float64).reshape(2, *shape) / 2**53
    return np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)


def second_moments(shape, steps):
    """Update a weight matrix with Adafactor, and return averages of squared gradients.

    The first result is the complete matrix V of averages, with one average for each
    weight. The other two results are the averages of each row and of each column, which
    Adafactor stores instead of V. The function train.adafactor_update computes all three
    results.

    shape: the shape of the weight matrix.
    steps: the number of updates.
    """
    rows, columns = shape
    # Simulate realistic gradients. The gradient of a weight matrix sums, over all tokens,
    # the products of activations and errors. Some channels have much larger activations
    # or errors than others, so each channel gets its own random scale.
    row_scale = np.exp(0.9 * random_normal(rows, seed=1))
    column_scale = np.exp(0.9 * random_normal(columns, seed=2))
    # Describe the same weights in two ways. For `matrix`, Adafactor stores only row and
    # column averages. The third axis of `full` has size 1. Therefore Adafactor does not
    # treat `full` as a matrix, and stores all averages.
    matrix = model.Param(shape, ("embed", "mlp"))
    full = model.Param((*shape, 1), ("embed", "mlp", None))
    table = {"matrix": matrix, "full": full}
    slots = jax.tree.map(
        lambda p: jnp.zeros(p.shape), train.adafactor_slots(table), is_leaf=model.is_param
    )
    params = {name: jnp.ones(p.shape) for name, p in table.items()}

    @jax.jit
    def update(params, grads, slots, count):
        cfg = configs.TrainConfig()
        return train.adafactor_update(table, params, grads, slots, count, 0.01, cfg)

    for step in range(steps):
        activations = row_scale * random_normal(6, rows, seed=10 + 2 * step)
        errors = column_scale * random_normal(6, columns, seed=11 + 2 * step)
        gradient = jnp.asarray(activations.T @ errors, jnp.float32)
        grads = {"matrix": gradient, "full": gradient[..., None]}
        params, slots = update(params, grads, slots, float(step))
    full, matrix = slots["full"]["full"][..., 0], slots["matrix"]
    return tuple(map(np.asarray, (full, matrix["row"], matrix["column"])))


def adafactor():
    """Draw the averages of squared gradients that Adam and Adafactor store.

    Adam stores one average for each weight. Adafactor stores one average for each row and
    one for each column of the weight matrix.
    """
    shape, rows, columns = (512, 1024), 22, 40
    full, row, column = second_moments(shape, 8)
    approximation = np.outer(row, column) / row.mean()
    picture = Picture(
        "What Adafactor stores: one average for each row and for each column",
        "The moving average of the squared gradients of a matrix, after 8 updates.",
        392,
    )
    shades = ["#f2f4f8", "#dae4f1", "#bdd1e8", "#98b8db", "#719bcb"]
    shades += ["#4b7cb6", "#31609c", "#1e467c", "#102d57"]

    def levels(values):
        # Convert each value to a level from 0 to 8, which selects the shade of its cell.
        # Each level stands for values four times as large as the level before.
        return np.clip(np.floor(np.log2(values) / 2 + 3.2), 0, 8).astype(int)

    def heat_map(x, y, values, cell=8):
        """Draw a matrix of numbers as a heat map, in which large numbers are dark.

        Neighboring cells of a row with the same shade are drawn as one thick line, which
        keeps the SVG file small.
        """
        found = levels(values)
        for level, shade in enumerate(shades):
            path = ""
            for i, line in enumerate(found == level):
                edges = np.flatnonzero(np.diff(line, prepend=False, append=False))
                for start, stop in edges.reshape(-1, 2).tolist():
                    x_start = number(x + cell * start)
                    path += f"M{x_start} {number(y + cell * (i + 0.5))}h"
                    path += number(cell * (stop - start))
            if path:
                picture.add("path", stroke=shade, stroke_width=cell, d=path)
        height, width = (cell * n for n in values.shape)
        picture.rect(x, y, width, height, fill="none", stroke=GRAY)

    crop = (slice(rows), slice(columns))
    y, left, right = 134, 20, 478
    stored = [np.size(full), np.size(row), np.size(column)]
    picture.text(left, 88, "Adam stores the complete matrix V", bold=True)
    text = f"{shape[0]} × {shape[1]} = {stored[0]:,} numbers"
    picture.text(left, 106, text, 12)
    heat_map(left, y, full[crop])
    picture.text(right - 52, 88, "Adafactor stores the vectors R and C", bold=True)
    text = f"{stored[1]} + {stored[2]} = {stored[1] + stored[2]:,} numbers"
    picture.text(right - 52, 106, text, 12)
    heat_map(right, y - 14, column[None, :columns])
    heat_map(right - 22, y, row[:rows, None])
    heat_map(right, y, approximation[crop])
    picture.text(right - 10, y - 4, "C", 12, "end", bold=True)
    picture.text(right - 28, y + 12, "R", 12, "end", bold=True)
    x = (left + 8 * columns + right - 40) / 2
    picture.text(x, y + 88, "≈", 26, "middle")
    y += 8 * rows + 20
    picture.text(left, y, "V: one average for each element", 12)
    picture.text(right, y, "V[i, j] ≈ R[i] C[j] / mean(R)", 12)
    for i, shade in enumerate(shades):
        picture.rect(left + 60 + 22 * i, y + 18, 22, 12, fill=shade)
    picture.text(left, y + 28, "small", 12)
    picture.text(left + 66 + 22 * len(shades), y + 28, "large (each shade: × 4)", 12)
    text = f"The picture shows {rows} of the {shape[0]} rows and {columns} of the "
    picture.text(left, y + 72, text + f"{shape[1]} columns.", 12)
    text = "Each update computes this approximation of V, and does not store it."
    picture.text(left, y + 54, text, 12)
    picture.height = y + 90
    return picture


# ---- learning-rate schedules -----------------------------------------------------------


def schedules():
    """Draw the learning rates of six schedules, computed by train.learning_rate."""
    recipes = {name: cfg.train for name, cfg in configs.RECIPES.items()}
    base = recipes["small_c4"]
    panels = [
        ("T5 pretraining (small_c4)", base, 40_000),
        ("fine-tuning (small_wmt_finetune)", recipes["small_wmt_finetune"], 20_000),
        ("the first run (tiny)", recipes["tiny"], 1500),
    ]
    others = [
        (
            "warmup, then 1 / sqrt(step)",
            "constant * linear_warmup * rsqrt_normalized_decay",
            {"learning_rate": 0.01},
        ),
        (
            "warmup, then linear decay",
            "linear_decay",
            {"learning_rate": 0.01, "decay_factor": 1 / 30_000},
        ),
        (
            "half of the rate every 10,000 steps",
            "constant * decay_every",
            {"learning_rate": 0.01, "steps_per_decay": 10_000},
        ),
    ]
    for title, schedule, values in others:
        cfg = dataclasses.replace(base, schedule=schedule, **values)
        panels.append((title, cfg, 40_000))
    picture = Picture(
        "Learning-rate schedules: products of factors",
        "The learning rate at each training step. A dashed line marks the end of the "
        "warmup (--train.warmup_steps).",
        526,
    )
    for i, (title, cfg, steps) in enumerate(panels):
        x, y = 68 + 268 * (i % 3), 256 + 222 * (i // 3)
        width, height = 192, 112
        start = cfg.start_step
        step = np.linspace(start, start + steps - 1, 97)
        # With the factor "decay_every", the learning rate falls suddenly at some steps.
        # Draw one point for the step before each fall, and one point for the step of the
        # fall. The line between the two points is then almost vertical.
        if "decay_every" in cfg.schedule:
            falls = np.arange(cfg.steps_per_decay, steps, cfg.steps_per_decay)
            after = np.searchsorted(step, falls)
            step[after - 1], step[after] = falls - 1, falls
        rates = np.broadcast_to(train.learning_rate(step, cfg), step.shape)
        top = cfg.learning_rate
        if cfg.schedule == base.schedule:
            top = 0.01
        factors = cfg.schedule.split(" * ")
        lines = [" * ".join(factors[:2]), " * ".join(["", *factors[2:]]).strip()]
        picture.text(x - 48, y - height - 52, title, bold=True)
        for j, line in enumerate(filter(None, lines)):
            picture.text(x - 48, y - height - 34 + 15 * j, line, 11, mono=True)
        for fraction in (0, 0.5, 1):
            level = y - height * fraction
            picture.line((x, level), (x + width, level), color=LIGHT, width=1)
            picture.text(x - 6, level + 4, f"{top * fraction:g}", 11, "end")
        for fraction in (0, 0.5, 1):
            tick = x + width * fraction
            picture.line((tick, y), (tick, y + 4), width=1)
            anchor = "end" if fraction == 1 and start else "middle"
            label = f"{int(start + steps * fraction):,}"
            picture.text(tick, y + 17, label, 11, anchor)
        picture.text(x + width / 2, y + 32, "training step", 11, "middle", GRAY)
        points = [
            (x + width * (s - start) / (steps - 1), y - height * rate / top)
            for s, rate in zip(step, rates)
        ]
        picture.line(*points, color=(BLUE, GREEN, ORANGE)[i % 3], width=2)
        warmup = cfg.warmup_steps
        if "constant" != cfg.schedule and "every" not in cfg.schedule:
            tick = x + width * warmup / steps
            picture.line((tick, y), (tick, y - height), width=1, dash="3 3")
    return picture


# ---- the cache of decoding -------------------------------------------------------------


def cache_of_steps(steps):
    """Run decoding steps with a small model, and find out how each step uses the cache.

    The function returns a data.Batch with the example, and a list with three boolean
    arrays for each step. Each array has one element for each position of the cache. The
    first array says which positions contain keys before the step, and the second array
    says the same for the time after the step. The third array says on which earlier
    positions the logits of the step depend.
    """
    cfg = configs.ModelConfig(
        vocab_size=SENTINELS[0] + 1,
        d_model=4,
        d_ff=4,
        d_kv=2,
        num_heads=2,
        num_layers=1,
        num_decoder_layers=1,
        dtype="float32",
    )
    mesh = jax.sharding.get_mesh()
    batch = one_row(*corrupted_example()[1:])
    params = model.init_params(cfg, jax.random.key(0))
    length = batch.targets.shape[1]
    encoded = random_normal(1, batch.inputs.shape[1], 4, seed=3).astype(np.float32)
    ids, segments, encoded = partition.put_batch(
        (batch.decoder_inputs, batch.input_segments, encoded), 1, mesh
    )
    cache, fixed = infer.init_cache(params, cfg, encoded, length)

    @jax.jit
    def step(ids, at, cache):
        def sum_of_logits(cache):
            logits, cache = infer.decode_step(
                params, cfg, ids, at, cache, fixed, segments
            )
            return logits.sum(), cache

        # To find the keys and values on which the logits depend, compute the derivative
        # of the logits with respect to the cache. The derivative is zero for all other
        # keys and values.
        derivative, cache = jax.grad(sum_of_logits, has_aux=True)(cache)
        return derivative, cache

    def used(arrays):
        keys, values = arrays[0]
        return np.asarray((abs(keys) + abs(values)).sum((0, 1, 3)) > 0)

    found = []
    for at in range(steps):
        before = used(cache)
        derivative, cache = step(ids[:, at : at + 1], at, cache)
        found.append((before, used(cache), used(derivative)))
    return batch, found


def kv_cache():
    """Draw which cached keys and values three decoding steps read and write."""
    batch, found = cache_of_steps(3)
    length = batch.targets.shape[1]
    picture = Picture(
        "The cache of keys and values, in three steps of decoding",
        "Each step computes the query, the key and the value of one token only. "
        "Older keys and values come from the cache.",
        560,
    )
    names = [NAMES[i] for i in batch.decoder_inputs[0].tolist()]
    targets = [NAMES[i] for i in batch.targets[0].tolist()]
    inputs = [short(i) for i in batch.inputs[0].tolist()]
    left, cell = 176, 76
    for at, (before, after, read) in enumerate(found):
        y = 84 + 140 * at
        picture.text(20, y + 12, f"Step {at}", bold=True)
        picture.box(20, y + 22, 92, 28, names[at], ORANGE, 12)
        picture.text(20, y + 67, "decoder input", 11, color=GRAY)
        picture.line((112, y + 36), (left - 8, y + 36), color=ORANGE, arrow=True)
        picture.text(left, y + 12, "cache of self-attention: keys and values", 12)
        for position in range(length):
            x = left + cell * position
            new = after[position] and not before[position]
            color = ORANGE if new else BLUE if after[position] else GRAY
            look = {} if after[position] else {"fill": WHITE, "stroke": LIGHT}
            text = names[position] if after[position] else "empty"
            picture.box(x, y + 22, cell - 4, 28, color=color, strong=new, **look)
            color = None if after[position] else "#9aa0a6"
            picture.text(x + cell / 2 - 2, y + 40, text, 11, "middle", color)
            if read[position] or new:
                picture.line(
                    (x + cell / 2 - 2, y + 51),
                    (x + cell / 2 - 2, y + 61),
                    color=ORANGE if new else BLUE,
                    width=2,
                )
        # Draw a line below all positions of the cache whose keys this step reads.
        visible = np.flatnonzero(read | (after & ~before))
        first, last = (left + cell * i + cell / 2 - 2 for i in visible[[0, -1]])
        picture.line((first, y + 61), (last, y + 61), color=BLUE, width=2)
        positions = f"positions 0 to {at}" if at else "position 0"
        text = (
            f"The query of position {at} reads {positions} of the cache and all keys of "
        )
        picture.text(left, y + 80, f"{text}cross-attention.", 12)
        x = left + cell * length
        picture.line((x, y + 36), (x + 16, y + 36), arrow=True)
        picture.box(x + 17, y + 22, 88, 28, targets[at], GRAY, 12)
        picture.text(x + 17, y + 12, "output", 12)
        if at + 1 < len(found):
            picture.line((66, y + 74), (66, y + 132), arrow=True)
            picture.text(
                76, y + 108, "The output is the next decoder input.", 12, color=GRAY
            )
    y = 84 + 140 * len(found) - 12
    picture.text(20, y + 10, "Fixed", bold=True)
    text = (
        "keys and values of cross-attention: computed once from the output of the encoder"
    )
    picture.text(left, y + 10, text, 12)
    width = 532 / len(inputs)
    for i, name in enumerate(inputs):
        picture.box(left + width * i, y + 20, width - 3, 26, name, GREEN, 11)
    picture.legend(
        left,
        y + 74,
        [
            (PALE[ORANGE], "written in this step"),
            (PALE[BLUE], "written in an earlier step"),
            (WHITE, "not written yet"),
        ],
    )
    text = "The tokens are those of the picture of span corruption."
    picture.text(left, y + 98, text, 12, color=GRAY)
    picture.height = y + 114
    return picture


# ---- beam search -----------------------------------------------------------------------

# NEXT is a tiny language model for the picture of beam search. The dict maps the words so
# far, such as "good day", to the probabilities of the next word.
NEXT = {
    "": {"good": 0.45, "hello": 0.35, "hi": 0.2},
    "good": {"day": 0.5, "morning": 0.35, "EOS": 0.15},
    "hello": {"EOS": 0.9, "there": 0.1},
    "good day": {"EOS": 0.8, "there": 0.2},
    "good morning": {"EOS": 0.9, "there": 0.1},
}
VOCABULARY = ["PAD", "EOS", "good", "hello", "hi", "day", "morning", "there"]


def next_logits(ids):
    """Return the logits of the next word for each beam, according to the model NEXT.

    The dict NEXT is a tiny language model. The result is an array of shape [1, beams,
    size of the vocabulary].

    ids: the ids of the earlier words of each beam, an array of shape [1, beams, words].
    """
    logits = np.full((*ids.shape[:2], len(VOCABULARY)), -1e4, np.float32)
    for beam, words in enumerate(ids[0].tolist()):
        prefix = " ".join(VOCABULARY[i] for i in words)
        for word, probability in NEXT.get(prefix, {"EOS": 1.0}).items():
            logits[0, beam, VOCABULARY.index(word)] = np.log(probability)
    return jnp.asarray(logits)


def words_of(ids):
    """Convert a sequence of word ids to a tuple of words, and leave out padding."""
    return tuple(VOCABULARY[i] for i in ids if i != data.PAD)


def search(beams, length):
    """Run beam search and greedy decoding with the tiny language model NEXT.

    The function returns three values. The first value is a list with the infer.BeamState
    after each step of beam search. The other two values are the output of greedy decoding
    and its score.

    beams: the number of beams.
    length: the maximum number of words of an output.
    """
    decode = configs.DecodeConfig(beams=beams)
    beam_step = jax.jit(functools.partial(infer.beam_step, decode=decode))
    greedy_step = jax.jit(infer.greedy_step)
    state, states = infer.start_beams(jnp.zeros(1), beams, length), []
    greedy = infer.start_greedy(jnp.zeros(1), 1, length)
    for at in range(length):
        if not state.done.all():
            logits = next_logits(np.asarray(state.ids)[:, :, :at])
            state = beam_step(state, logits, at)
            states.append(jax.tree.map(np.asarray, state))
        logits = next_logits(np.asarray(greedy.ids)[:, :, :at])
        greedy = greedy_step(greedy, logits, at)
    return states, words_of(np.asarray(greedy.ids)[0, 0]), float(greedy.scores[0, 0])


def beam_search():
    """Draw a beam search with two beams as a tree.

    Each node of the tree is an output that the search has explored, with its score.
    """
    beams = 2
    states, greedy, greedy_score = search(beams, 5)
    assert states[-1].done.all(), "the search must end"
    # Collect the live outputs of each step, and all finished outputs. A live output can
    # still be extended, and a finished output ends with EOS. Beam search has dropped all
    # other outputs.
    live, finished = [], {}
    for state in states:
        live.append(
            {
                words_of(ids): float(score)
                for ids, score in zip(state.ids[0], state.live_scores[0])
                if score > infer.MASKED_SCORE / 2
            }
        )
        for ids, score, is_finished in zip(
            state.finished_ids[0], state.finished_scores[0], state.finished[0]
        ):
            if is_finished:
                finished.setdefault(words_of(ids), float(score))
    best = words_of(states[-1].finished_ids[0, 0])
    picture = Picture(
        f"Beam search with {beams} beams",
        "Each step extends the live beams by every word. The number on a line is the "
        "probability of the word.",
        520,
    )
    columns, width = (150, 355, 560), 110
    y_of, next_y = {}, [112]

    def place(prefix):
        """Choose the vertical positions of an output and of all its continuations.

        An output is placed at the mean height of its continuations. The function returns
        the vertical position of the output.

        prefix: the words of the output.
        """
        parents = [(), *live[len(prefix) - 1]] if prefix else [()]
        children = NEXT.get(" ".join(prefix), {}) if prefix in parents else {}
        if len(prefix) >= len(states) or "EOS" in prefix:
            children = {}
        if children:
            places = [place((*prefix, word)) for word in children]
            y_of[prefix] = sum(places) / len(places)
        else:
            y_of[prefix] = next_y[0]
            next_y[0] += 36
        return y_of[prefix]

    place(())
    for step, x in enumerate(columns[: len(states)]):
        picture.text(x + width / 2, 86, f"step {step}", 12, "middle", bold=True)
    picture.box(20, y_of[()] - 13, 56, 26, "start", GRAY)
    log_prob = {(): 0.0}
    for output in sorted(y_of, key=len):
        if not output:
            continue
        parent, word = output[:-1], output[-1]
        probability = NEXT[" ".join(parent)][word]
        log_prob[output] = log_prob[parent] + float(np.log(probability))
        depth = len(output)
        x = columns[depth - 1]
        x_parent = 76 if depth == 1 else columns[depth - 2] + width
        is_live = output in live[depth - 1]
        # Check that infer.beam_step has computed the same score as the picture shows.
        if is_live:
            assert abs(live[depth - 1][output] - log_prob[output]) < 1e-4
        color = GREEN if output in finished else BLUE if is_live else GRAY
        is_best = output == best[:depth]
        y, y_parent = y_of[output], y_of[parent]
        picture.line(
            (x_parent, y_parent), (x, y), color=color, width=2.5 if is_best else 1.2
        )
        share = 0.68
        middle = x_parent + share * (x - x_parent), y_parent + share * (y - y_parent)
        picture.rect(middle[0] - 14, middle[1] - 8, 28, 15, fill="#fcfcfb")
        picture.text(middle[0], middle[1] + 4, f"{probability:.2f}", 11, "middle")
        score = f"{log_prob[output]:.2f}".replace("-", "−")
        strong = output == best
        picture.box(x, y - 13, width, 26, f"{word}  {score}", color, 12, strong)
        if output in finished:
            penalty = infer.length_penalty(depth, configs.DecodeConfig())
            assert abs(log_prob[output] / penalty - finished[output]) < 1e-4
            final = f"{finished[output]:.2f}".replace("-", "−")
            text = f"÷ {penalty:.2f} = {final}"
            # Beam search keeps only the best finished outputs. If a later step drops this
            # output, write the number of that step beside the output.
            for later in range(depth, len(states)):
                if output not in map(words_of, states[later].finished_ids[0]):
                    text += f", dropped in step {later}"
                    break
            picture.text(x + width + 8, y + 4, text, 12, color=GREEN, bold=True)
    y = next_y[0] + 14
    picture.legend(
        20,
        y,
        [
            (PALE[BLUE], "live beam"),
            (PALE[GREEN], "finished output"),
            (PALE[GRAY], "not kept"),
        ],
    )
    y += 26
    best_score, greedy_score = (
        f"{score:.2f}".replace("-", "−") for score in (log_prob[best], greedy_score)
    )
    y = picture.paragraph(
        y,
        f"The search keeps the {beams} best live beams and the {beams} best finished "
        "outputs. The number in a box is the sum of the log-probabilities of the words "
        "so far. Finished outputs are ranked by this sum, divided by the length penalty. "
        f"The best output is “{' '.join(best[:-1])}”, with the sum {best_score}. Greedy "
        "decoding takes the most probable word in each step. It finds "
        f"“{' '.join(greedy[:-1])}”, which is less probable: its sum is {greedy_score}.",
    )
    picture.height = y + 4
    return picture


# ---- devices ---------------------------------------------------------------------------


def devices():
    """Draw what each of eight devices stores, and what the devices send to each other.

    The picture compares data parallelism, FSDP and tensor parallelism, which use the
    eight devices in different ways. The slow test
    test_shardings_communicate_what_they_must checks that the devices send what the
    picture says.
    """
    base = configs.RECIPES["base_c4"]
    picture = Picture(
        "What each of eight devices holds, and what the devices send to each other",
        "Each mesh trains T5 1.1 base. The matrix is the first matrix of an MLP. "
        "It stands for all weights.",
        700,
    )
    weight = model.param_table(base.model)["encoder"]["layers"]["mlp"]["up"]
    shape, axes = weight.shape[1:], weight.axes[1:]
    batch_size = base.train.batch_size
    everything = 4 * model.count_params(model.param_table(base.model))
    meshes = [
        (
            "Data parallelism",
            "the default",
            dict(model=1, fsdp=False),
            ["No communication of weights or activations."],
            ["All-reduce over “data” sums the", "gradients of all weights."],
        ),
        (
            "FSDP (ZeRO-3)",
            "--mesh.fsdp true",
            dict(model=1, fsdp=True),
            ["All-gather over “data” joins the weights of", "a layer just before use."],
            ["Weights are gathered again. The gradients are", "summed over “data”."],
        ),
        (
            "Tensor parallelism",
            "--mesh.model 4",
            dict(model=4, fsdp=False),
            [
                "All-reduce over “model” sums the results of",
                "each attention and each MLP.",
            ],
            [
                "All-reduce over “model” sums activations, and",
                "over “data” the gradients of the weights.",
            ],
        ),
    ]
    y = 84
    for title, flag, options, forward, backward in meshes:
        cfg = dataclasses.replace(base, mesh=dataclasses.replace(base.mesh, **options))
        mesh = partition.set_mesh(cfg, jax.devices()[:8])
        rules = partition.STORAGE_RULES if cfg.mesh.fsdp else partition.RULES
        stored = jax.NamedSharding(mesh, partition.spec(axes, rules))
        used = jax.NamedSharding(mesh, partition.spec(axes))
        rows = jax.NamedSharding(mesh, partition.spec(("batch",)))
        state = train.state_template(cfg, mesh)
        own = partition.bytes_on_device(state.params) / 1e6
        sizes = " × ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
        picture.text(20, y, title, bold=True)
        picture.text(200, y, flag, 12, mono=True)
        picture.text(360, y, f"mesh axes: {sizes}", 12)
        text = f"each stores {own:,.0f} of {everything / 1e6:,.0f} MB of weights"
        picture.text(810, y, text, 12, "end")
        for i, device in enumerate(mesh.devices.flat):
            x = 20 + 99 * i
            position = np.argwhere(mesh.devices == device)[0]
            picture.rect(x, y + 10, 95, 90, rx=4, fill=WHITE, stroke=LIGHT)
            picture.text(x + 8, y + 25, f"device {i}", 11)
            place = ", ".join(map(str, position))
            picture.text(x + 88, y + 25, place, 11, "end", GRAY)

            def part(x, y, width, height, sharding, shape, color):
                """Draw the shard of an array that one device holds.

                A rectangle stands for the complete array. The function fills the part of
                the rectangle that stands for the shard.

                x, y, width, height: the position and the size of the rectangle.
                """
                bounds = [
                    index.indices(size)[:2]
                    for index, size in zip(
                        sharding.devices_indices_map(shape)[device], shape
                    )
                ]
                (top, bottom), (start, stop) = [*bounds, (0, 1)][:2]
                columns = [*shape, 1][1]
                picture.rect(
                    x + width * start / columns,
                    y + height * top / shape[0],
                    width * (stop - start) / columns,
                    height * (bottom - top) / shape[0],
                    fill=color,
                )

            batch = x + 8, y + 33, 18, 60
            matrix = x + 34, y + 33, 54, 60
            part(*batch, rows, (batch_size,), BLUE)
            part(*matrix, used, shape, PALE[ORANGE])
            part(*matrix, stored, shape, ORANGE)
            for rectangle in (batch, matrix):
                x_left, top, width, height = rectangle
                picture.rect(x_left, top, width, height, fill="none", stroke=GRAY)
        for x, width, head, lines in (
            (20, 280, "forward pass", forward),
            (308, 300, "backward pass", backward),
            (616, 194, "update", ["Each device updates the", "weights that it stores."]),
        ):
            picture.box(x, y + 108, width, 58, color=GRAY, fill="#f3f4f6", stroke=LIGHT)
            picture.text(x + 8, y + 124, head, 12, bold=True)
            for i, line in enumerate(lines):
                picture.text(x + 8, y + 140 + 15 * i, line, 12)
        y += 196
    picture.legend(
        20,
        y,
        [
            (BLUE, "its rows of the batch"),
            (ORANGE, "its part of the stored weights"),
            (PALE[ORANGE], "gathered for use, and then deleted"),
            (WHITE, "on other devices"),
        ],
    )
    text = "Two numbers in a device are its indices on the axes “data” and “model”. The "
    picture.text(20, y + 24, text + "optimizer state is split like the weights.", 12)
    picture.height = y + 42
    return picture


# ---- a checkpoint and a kill -----------------------------------------------------------


class Killed(BaseException):
    """This exception interrupts the saving of a checkpoint, as `kill -9` would do."""


def save_and_kill(when):
    """Save two checkpoints, and interrupt the second save, as a kill would do.

    The two checkpoints have the step numbers 1000 and 2000. The function then restarts
    the run, which deletes incomplete checkpoints. The picture shows the files before the
    second save, at the interruption and after the restart.

    The function returns (found, step). The list `found` has the result of the inner
    function `files` at these three times. The restarted run resumes from `step`.

    when: "shards", "manifest" or "rename". The save is interrupted while the shards are
        written, after the manifest is written, or after the folder is renamed.
    """
    mesh = partition.set_mesh(configs.RECIPES["tiny"], jax.devices()[:1])
    sharding = jax.NamedSharding(mesh, jax.P())
    tree = {name: jax.device_put(np.ones(64, np.float32), sharding) for name in "ab"}
    template = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree
    )

    def files():
        """Return a dict from the path of each file to the size of the file in bytes.

        Folders are included, with the size -1. All paths are relative to the folder that
        contains the checkpoints.
        """
        return {
            str(path.relative_to(folder)): path.stat().st_size if path.is_file() else -1
            for path in sorted(folder.rglob("*"))
        }

    def interrupted_write(path, shards):
        def first_shard():
            yield shards[0]
            raise Killed

        return write_shards(path, first_shard())

    def interrupted_sync(path):
        # Saving a checkpoint calls sync_folder twice. The first call follows the writing
        # of the manifest, and `path` is the folder of the checkpoint. The second call
        # follows the renaming of this folder, and `path` is its parent folder.
        if (path == folder) == (when == "rename"):
            raise Killed

    write_shards = partition.write_shards
    change = {"shards": {"write_shards": interrupted_write}}
    change = change.get(when, {"sync_folder": interrupted_sync})
    with tempfile.TemporaryDirectory() as run_dir:
        checkpoints = partition.Checkpoints(run_dir, background=False)
        folder = checkpoints.folder
        checkpoints.save(tree, 1000)
        found = [files()]
        with unittest.mock.patch.multiple(partition, **change):
            try:
                checkpoints.save(tree, 2000)
            except Killed:
                found.append(files())
        restarted = partition.Checkpoints(run_dir, background=False)
        restarted.discard_unfinished()
        found.append(files())
        step, _ = restarted.load(template)
    return found, step


def checkpoint():
    """Draw the files of a checkpoint folder before, during and after a killed save.

    The picture shows that a kill at any moment leaves at least one complete checkpoint.
    """
    picture = Picture(
        "A checkpoint folder before, during and after a kill",
        "The save of step 2000 is killed at three different moments. A local folder "
        "named step_... is always complete.",
        560,
    )
    moments = {
        "shards": "kill while the shards are written",
        "manifest": "kill before the rename",
        "rename": "kill after the rename",
    }
    steps = ["1. write the shard files", "2. write manifest.json", "3. rename the folder"]
    for i, step in enumerate(steps):
        x = 205 + 205 * i
        picture.box(x, 78, 175, 28, step, BLUE)
        if i:
            picture.line((x - 30, 92), (x - 1, 92), arrow=True)
    picture.text(20, 97, "A save has three steps:", bold=True)
    columns = (20, 290, 560)
    heads = ["Before the save", "At the kill", "After the restart"]
    for x, head in zip(columns, heads):
        picture.text(x, 140, head, bold=True)
    y = 150
    for when, title in moments.items():
        found, step = save_and_kill(when)
        complete = found[0]["step_00001000/pieces-00000-of-00001.msgpack"]
        lines = max(map(len, found))
        height = 50 + 17 * lines
        for x, files, head in zip(
            columns, found, ("", title, f"resumes at step {step:,}")
        ):
            is_middle = head == title
            color = ORANGE if is_middle else GREEN if head else GRAY
            picture.box(x, y, 250, height, color=color, fill=WHITE)
            head = head or "the checkpoint of step 1,000"
            picture.text(x + 10, y + 19, head, 12, color=color, bold=True)
            for i, (path, size) in enumerate(files.items()):
                folder, _, name = path.rpartition("/")
                temporary = path.startswith("tmp-")
                line = name if folder else f"{name}/"
                color = ORANGE if temporary else None
                x_line = x + 10 + 14 * bool(folder)
                y_line = y + 40 + 17 * i
                picture.text(x_line, y_line, line, 11, color=color, mono=True)
                if "pieces" in path and size < complete:
                    text = "(this file is incomplete)"
                    picture.text(x_line, y_line + 15, text, 11, color=ORANGE)
        for x in columns[1:]:
            picture.line((x - 19, y + height / 2), (x - 2, y + height / 2), arrow=True)
        y += height + 14
    y = picture.paragraph(
        y + 10,
        "The folder tmp-step_00002000 becomes step_00002000 by one rename, which a kill "
        "cannot split. A restart deletes folders named tmp-... and loads the newest "
        "checkpoint. Cloud storage cannot rename folders. There, a checkpoint is "
        "complete when it contains manifest.json, which is written last.",
    )
    picture.height = y + 4
    return picture


# ---- the command -----------------------------------------------------------------------

PICTURES = {
    function.__name__: function
    for function in (
        span_corruption,
        attention,
        buckets,
        packed,
        adafactor,
        schedules,
        kv_cache,
        beam_search,
        devices,
        checkpoint,
    )
}


def draw_all(folder):
    """Draw all pictures of the project, and write each picture to an SVG file.

    folder: the folder in which the SVG files are written.
    """
    partition.set_mesh(configs.RECIPES["tiny"], jax.devices()[:1])
    for name, draw in PICTURES.items():
        (Path(folder) / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    draw_all(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
