#!/usr/bin/env python3
"""Makes DejaVuSans-subset.ttf and ../src/pdf/glyphs.rs from DejaVuSans.ttf 2.37 (fonttools 4.68).

Usage, in this folder: python3 subset.py /usr/share/fonts/truetype/dejavu/DejaVuSans.ttf
"""

import hashlib
import sys

from fontTools import subset
from fontTools.ttLib import TTFont

SUBSET = "DejaVuSans-subset.ttf"
TABLE = "../src/pdf/glyphs.rs"
# Latin, Cyrillic, dashes, quotes, signs. Without combining marks and the soft hyphen, which looks
# like a hyphen.
RANGES = [
    (0x20, 0x7E), (0xA0, 0xAC), (0xAE, 0x17F), (0x218, 0x21B), (0x400, 0x482), (0x48A, 0x4FF),
    (0x2012, 0x2015), (0x2018, 0x201F), (0x2020, 0x2022), (0x2026, 0x2026), (0x2030, 0x2030),
    (0x2032, 0x2033), (0x2039, 0x203A), (0x20AC, 0x20AC), (0x20BD, 0x20BD), (0x2116, 0x2116),
    (0x2122, 0x2122), (0x2212, 0x2212),
]
HEAD = '''//! Glyphs and measures of the embedded font. Made by `service-kit/fonts/subset.py`.

/// SHA-256 of the font file that this table belongs to.
#[cfg(test)]
pub const FONT_SHA256: &str = "{sha256}";

/// Units of the measures below, per em.
pub const UNITS_PER_EM: i32 = {units};
pub const ASCENT: i32 = {ascent};
pub const DESCENT: i32 = {descent};
pub const CAP_HEIGHT: i32 = {cap_height};
/// Left, bottom, right, top of the box that contains each glyph.
pub const BOX: [i32; 4] = {box};

/// Character, number of its glyph in the font, width; by character.
#[rustfmt::skip]
pub static GLYPHS: [(char, u16, i32); {count}] = [
'''


def make_subset(source):
    options = subset.Options()
    options.hinting = False
    options.layout_features = []
    options.notdef_outline = True
    options.recalc_bounds = True
    options.name_IDs = [0, 1, 2, 3, 4, 5, 6, 14]
    options.drop_tables += ["GDEF", "GPOS", "GSUB", "MATH", "FFTM", "gasp"]
    font = subset.load_font(source, options)
    # The file's bytes depend on the source alone.
    font.recalcTimestamp = False
    chars = [code for first, last in RANGES for code in range(first, last + 1)]
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=chars)
    subsetter.subset(font)
    subset.save_font(font, SUBSET, options)


def table():
    with open(SUBSET, "rb") as file:
        sha256 = hashlib.sha256(file.read()).hexdigest()
    font = TTFont(SUBSET)
    head, widths = font["head"], font["hmtx"]
    capital = font["glyf"][font.getBestCmap()[ord("H")]]
    cmap = sorted(font.getBestCmap().items())
    rows = [(code, font.getGlyphID(name), widths[name][0]) for code, name in cmap]
    text = HEAD.format(
        sha256=sha256,
        units=head.unitsPerEm,
        ascent=font["hhea"].ascent,
        descent=font["hhea"].descent,
        cap_height=capital.yMax,
        box=[head.xMin, head.yMin, head.xMax, head.yMax],
        count=len(rows),
    )
    cells = [f"('\\u{{{code:x}}}', {glyph}, {width})," for code, glyph, width in rows]
    for at in range(0, len(cells), 4):
        text += "    " + " ".join(cells[at:at + 4]) + "\n"
    with open(TABLE, "w", encoding="utf-8") as file:
        file.write(text + "];\n")


make_subset(sys.argv[1])
table()
