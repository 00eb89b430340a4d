//! Text as a document in PDF 1.7: pure functions.
//!
//! The bytes depend on the arguments alone: no clock and no random number. The document embeds its
//! font (`service-kit/fonts`) and maps each glyph to its character, so that text can be searched
//! and copied. No character is left out: one that the font lacks is shown as `\u{4e2d}`.
//!
//! The font takes some 30 KB of each document.

mod glyphs;
mod lines;
mod table;

use std::collections::BTreeMap;
use std::sync::LazyLock;

use miniz_oxide::deflate::compress_to_vec_zlib;
use pdf_writer::types::{CidFontType, FontFlags, SystemInfo, UnicodeCmap};
use pdf_writer::{Content, Filter, Name, Pdf, Rect, Ref, Settings, Str, TextStr};

use glyphs::{ASCENT, BOX, CAP_HEIGHT, DESCENT, GLYPHS, UNITS_PER_EM};

pub use lines::document;
pub use table::Table;

const FONT: &[u8] = include_bytes!("../../fonts/DejaVuSans-subset.ttf");
/// The same in each document.
static FONT_STREAM: LazyLock<Vec<u8>> = LazyLock::new(|| compressed(FONT));
/// Name of an embedded font that is a subset: a tag of six letters, then the font's name.
const FONT_NAME: Name = Name(b"DFAEXT+DejaVuSans");
/// Name of the font in the pages.
const FONT_KEY: Name = Name(b"F1");
const IDENTITY: SystemInfo = SystemInfo {
    registry: Str(b"Adobe"),
    ordering: Str(b"Identity"),
    supplement: 0,
};

const CATALOG: Ref = Ref::new(1);
const PAGES: Ref = Ref::new(2);
const TYPE0_FONT: Ref = Ref::new(3);
const CID_FONT: Ref = Ref::new(4);
const DESCRIPTOR: Ref = Ref::new(5);
const FONT_FILE: Ref = Ref::new(6);
const TO_UNICODE: Ref = Ref::new(7);
const INFO: Ref = Ref::new(8);
/// The pages, each followed by its content and its footer.
const FIRST_PAGE: i32 = 9;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Glyph {
    id: u16,
    /// In units of the font.
    width: i32,
    of: char,
}

/// A document that is written page by page. Finished pages are kept compressed. Lengths are in
/// points.
struct Pages {
    pdf: Pdf,
    /// Width and height of each page.
    size: (i32, i32),
    /// Number of finished pages.
    count: i32,
    /// Content of the page that is being written.
    content: Content,
    /// The glyphs of the document, by number.
    used: BTreeMap<u16, Glyph>,
}

impl Pages {
    /// `id` is the document's identifier, `language` the tag of its language.
    fn new(title: &str, id: &str, language: &str, size: (i32, i32)) -> Self {
        let mut pdf = Pdf::with_settings(Settings { pretty: false });
        pdf.catalog(CATALOG).pages(PAGES).lang(TextStr(language));
        pdf.document_info(INFO).title(TextStr(title));
        pdf.set_file_id((id.as_bytes().to_vec(), id.as_bytes().to_vec()));
        Self {
            pdf,
            size,
            count: 0,
            content: Content::new(),
            used: BTreeMap::new(),
        }
    }

    /// Adds rows of text to the page: left end, height above the lower edge, glyphs.
    fn text<'a>(&mut self, size: i32, rows: impl IntoIterator<Item = (i32, i32, &'a [Glyph])>) {
        self.content.begin_text();
        self.content.set_font(FONT_KEY, size as f32);
        for (x, y, row) in rows {
            self.used.extend(row.iter().map(|glyph| (glyph.id, *glyph)));
            let codes: Vec<u8> = row
                .iter()
                .flat_map(|glyph| glyph.id.to_be_bytes())
                .collect();
            self.content
                .set_text_matrix([1.0, 0.0, 0.0, 1.0, x as f32, y as f32]);
            self.content.show(Str(&codes));
        }
        self.content.end_text();
    }

    /// Adds a horizontal line to the page.
    fn rule(&mut self, (left, right): (i32, i32), y: i32, width: f32) {
        self.content.set_line_width(width);
        self.content.move_to(left as f32, y as f32);
        self.content.line_to(right as f32, y as f32);
        self.content.stroke();
    }

    /// Finishes the page and starts the next one.
    fn end_page(&mut self) {
        let content = std::mem::replace(&mut self.content, Content::new());
        let stream = Ref::new(page_ref(self.count).get() + 1);
        let data = compressed(&content.finish());
        self.pdf.stream(stream, &data).filter(Filter::FlateDecode);
        self.count += 1;
    }

    /// The document of the finished pages. `footer` returns the text at the bottom of a page, from
    /// the page's number and the number of pages; it starts at (`x`, `y`).
    fn finish(
        mut self,
        (x, y): (i32, i32),
        size: i32,
        footer: impl Fn(i32, i32) -> String,
    ) -> Vec<u8> {
        let count = self.count;
        for index in 0..count {
            let text = glyphs(&footer(index + 1, count));
            self.text(size, [(x, y, text.as_slice())]);
            let content = std::mem::replace(&mut self.content, Content::new());
            let data = compressed(&content.finish());
            let page = page_ref(index);
            let [body, foot] = [1, 2].map(|after| Ref::new(page.get() + after));
            self.pdf.stream(foot, &data).filter(Filter::FlateDecode);
            let (width, height) = self.size;
            let mut page = self.pdf.page(page);
            page.parent(PAGES).contents_array([body, foot]);
            page.media_box(Rect::new(0.0, 0.0, width as f32, height as f32));
            page.resources().fonts().pair(FONT_KEY, TYPE0_FONT);
        }
        let refs = (0..count).map(page_ref);
        self.pdf.pages(PAGES).kids(refs).count(count);
        write_font(&mut self.pdf, &self.used);
        self.pdf.finish()
    }
}

/// `index` is from 0.
fn page_ref(index: i32) -> Ref {
    Ref::new(FIRST_PAGE + 3 * index)
}

/// The font, with widths and characters of the glyphs that the document uses.
fn write_font(pdf: &mut Pdf, used: &BTreeMap<u16, Glyph>) {
    pdf.type0_font(TYPE0_FONT)
        .base_font(FONT_NAME)
        .encoding_predefined(Name(b"Identity-H"))
        .descendant_font(CID_FONT)
        .to_unicode(TO_UNICODE);
    let mut font = pdf.cid_font(CID_FONT);
    font.subtype(CidFontType::Type2)
        .base_font(FONT_NAME)
        .system_info(IDENTITY)
        .font_descriptor(DESCRIPTOR)
        .cid_to_gid_map_predefined(Name(b"Identity"));
    let mut widths = font.widths();
    for glyph in used.values() {
        widths.consecutive(glyph.id, [per_mille(glyph.width)]);
    }
    drop(widths);
    drop(font);
    let [left, bottom, right, top] = BOX.map(per_mille);
    pdf.font_descriptor(DESCRIPTOR)
        .name(FONT_NAME)
        .flags(FontFlags::SYMBOLIC)
        .bbox(Rect::new(left, bottom, right, top))
        .italic_angle(0.0)
        .ascent(per_mille(ASCENT))
        .descent(per_mille(DESCENT))
        .cap_height(per_mille(CAP_HEIGHT))
        .stem_v(80.0)
        .font_file2(FONT_FILE);
    let mut file = pdf.stream(FONT_FILE, &FONT_STREAM);
    file.filter(Filter::FlateDecode);
    file.pair(Name(b"Length1"), FONT.len() as i32);
    drop(file);
    let mut characters = UnicodeCmap::new(Name(b"Characters"), IDENTITY);
    for glyph in used.values() {
        characters.pair(glyph.id, glyph.of);
    }
    let data = compressed(&characters.finish());
    pdf.stream(TO_UNICODE, &data).filter(Filter::FlateDecode);
}

/// Units of the font in thousandths of its size.
fn per_mille(units: i32) -> f32 {
    (units * 1_000) as f32 / UNITS_PER_EM as f32
}

fn compressed(data: &[u8]) -> Vec<u8> {
    compress_to_vec_zlib(data, 6)
}

fn glyph(of: char) -> Option<Glyph> {
    let found = GLYPHS.binary_search_by_key(&of, |(known, ..)| *known);
    found.ok().map(|at| {
        let (_, id, width) = GLYPHS[at];
        Glyph { id, width, of }
    })
}

fn glyphs(text: &str) -> Vec<Glyph> {
    let mut found = Vec::with_capacity(text.len());
    for of in text.chars() {
        match glyph(of) {
            Some(known) => found.push(known),
            None => found.extend(of.escape_unicode().filter_map(glyph)),
        }
    }
    found
}

/// The rows of a line, of which the first is at most `limits[0]` units wide and each further one
/// `limits[1]`. A row ends after the last glyph that fits and that `may_end` a row, else after the
/// last one that fits; a row has at least one glyph. Together they have all glyphs of the line.
fn wrapped(line: &[Glyph], limits: [i32; 2], may_end: fn(char) -> bool) -> Vec<&[Glyph]> {
    let (mut rows, mut rest) = (Vec::new(), line);
    let [mut limit, further] = limits;
    loop {
        let fits = fitting(rest, limit);
        if fits == rest.len() {
            rows.push(rest);
            return rows;
        }
        let last = match rest[fits].of {
            // A space may end beyond the limit.
            ' ' => Some(fits),
            _ => rest[..fits].iter().rposition(|glyph| may_end(glyph.of)),
        };
        let end = last.map_or(fits.max(1), |at| at + 1);
        let (row, after) = rest.split_at(end);
        rows.push(row);
        if after.is_empty() {
            return rows;
        }
        rest = after;
        limit = further;
    }
}

/// Number of the first glyphs that are together at most `limit` units wide.
fn fitting(glyphs: &[Glyph], limit: i32) -> usize {
    let mut width = 0;
    let fits = glyphs.iter().take_while(|glyph| {
        width += glyph.width;
        width <= limit
    });
    fits.count()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use sha2::{Digest as _, Sha256};

    use super::glyphs::FONT_SHA256;
    use super::*;

    fn text(glyphs: &[Glyph]) -> String {
        glyphs.iter().map(|glyph| glyph.of).collect()
    }

    #[test]
    fn the_table_of_glyphs_is_that_of_the_font() {
        assert_eq!(format!("{:x}", Sha256::digest(FONT)), FONT_SHA256);
        assert!(GLYPHS.is_sorted_by(|a, b| a.0 < b.0));
        assert!(GLYPHS.iter().all(|(_, _, width)| *width > 0));
        // Each character has a glyph of its own, so a glyph maps to one character.
        let ids: BTreeSet<u16> = GLYPHS.iter().map(|(_, id, _)| *id).collect();
        assert_eq!(ids.len(), GLYPHS.len());
    }

    #[test]
    fn a_character_that_the_font_lacks_is_escaped() {
        assert_eq!(text(&glyphs("Ёж № 1 «a»")), "Ёж № 1 «a»");
        assert_eq!(
            text(&glyphs("a\u{4e2d}\u{202e}\n")),
            "a\\u{4e2d}\\u{202e}\\u{a}"
        );
    }

    #[test]
    fn rows_fit_their_limits_and_keep_every_character() {
        const LIMITS: [i32; 2] = [100_000, 90_000];
        let words = "дело № 2-17/2026 ".repeat(40);
        let long = "щ".repeat(500);
        for line in ["", "a", &words, &long, &format!("- {long} {words}")] {
            let line = glyphs(line);
            let rows = wrapped(&line, LIMITS, |of| of == ' ');
            let together: Vec<Glyph> = rows.concat();
            assert_eq!(together, line);
            for (index, row) in rows.iter().enumerate() {
                let shown = text(row);
                let visible = glyphs(shown.trim_end());
                let width: i32 = visible.iter().map(|glyph| glyph.width).sum();
                assert!(width <= LIMITS[index.min(1)], "{shown}");
            }
        }
        // Words are whole where they can be.
        let line = glyphs(&words);
        let rows = wrapped(&line, LIMITS, |of| of == ' ');
        assert!(rows.len() > 1 && rows.iter().all(|row| text(row).ends_with(' ')));
        // A limit below the width of a glyph: a glyph per row.
        let line = glyphs("Щит");
        assert_eq!(wrapped(&line, [1, 1], |of| of == ' ').len(), 3);
    }
}
