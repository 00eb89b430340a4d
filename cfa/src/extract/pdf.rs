//! Lines of text as an A4 document in PDF 1.7: a pure function.
//!
//! The bytes depend on the arguments alone: no clock and no random number. The document embeds its
//! font (`cfa/fonts`) and maps each glyph to its character, so that text can be searched and
//! copied. A line wider than the page continues on the next one, with an indent. No character is
//! left out: one that the font lacks is shown as `\u{4e2d}`.
//!
//! A document has some 30 KB, most of it the font.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use miniz_oxide::deflate::compress_to_vec_zlib;
use pdf_writer::types::{CidFontType, FontFlags, SystemInfo, UnicodeCmap};
use pdf_writer::{Content, Filter, Name, Pdf, Rect, Ref, Settings, Str, TextStr};

use super::glyphs::{ASCENT, BOX, CAP_HEIGHT, DESCENT, GLYPHS, UNITS_PER_EM};

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

// Lengths in points.
const PAGE_WIDTH: i32 = 595;
const PAGE_HEIGHT: i32 = 842;
const MARGIN: i32 = 57;
const INDENT: i32 = 12;
const SIZE: i32 = 10;
const LEADING: i32 = 14;
const FOOTER_SIZE: i32 = 8;
const FOOTER_HEIGHT: i32 = 34;

const LINES_PER_PAGE: usize = ((PAGE_HEIGHT - 2 * MARGIN) / LEADING) as usize;
/// Width of a line in units of the font.
const LINE_UNITS: i32 = (PAGE_WIDTH - 2 * MARGIN) * UNITS_PER_EM / SIZE;
const INDENT_UNITS: i32 = INDENT * UNITS_PER_EM / SIZE;

const _: () = assert!(FOOTER_HEIGHT + FOOTER_SIZE < MARGIN);

const CATALOG: Ref = Ref::new(1);
const PAGES: Ref = Ref::new(2);
const TYPE0_FONT: Ref = Ref::new(3);
const CID_FONT: Ref = Ref::new(4);
const DESCRIPTOR: Ref = Ref::new(5);
const FONT_FILE: Ref = Ref::new(6);
const TO_UNICODE: Ref = Ref::new(7);
const INFO: Ref = Ref::new(8);
/// The pages, each followed by its content.
const FIRST_PAGE: i32 = 9;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Glyph {
    id: u16,
    /// In units of the font.
    width: i32,
    of: char,
}

/// The document of `lines`, with `title` and the number of the page at the bottom of each page.
/// `id` is the document's identifier.
pub fn document(title: &str, id: &str, lines: &[String]) -> Vec<u8> {
    let lines: Vec<Vec<Glyph>> = lines.iter().map(|line| glyphs(line)).collect();
    let rows: Vec<(i32, &[Glyph])> = lines.iter().flat_map(|line| wrapped(line)).collect();
    let pages: Vec<&[(i32, &[Glyph])]> = rows.chunks(LINES_PER_PAGE).collect();
    let mut used: BTreeMap<u16, Glyph> = BTreeMap::new();
    let mut pdf = Pdf::with_settings(Settings { pretty: false });
    pdf.catalog(CATALOG).pages(PAGES).lang(TextStr("ru-RU"));
    pdf.document_info(INFO).title(TextStr(title));
    pdf.set_file_id((id.as_bytes().to_vec(), id.as_bytes().to_vec()));
    let refs = (0..pages.len()).map(page_ref);
    pdf.pages(PAGES).kids(refs).count(pages.len() as i32);
    for (index, rows) in pages.iter().enumerate() {
        let footer = format!("{title}, страница {} из {}", index + 1, pages.len());
        let footer = glyphs(&footer);
        let shown = rows.iter().flat_map(|(_, row)| row.iter()).chain(&footer);
        used.extend(shown.map(|glyph| (glyph.id, *glyph)));
        write_page(&mut pdf, index, rows, &footer);
    }
    write_font(&mut pdf, &used);
    pdf.finish()
}

fn page_ref(index: usize) -> Ref {
    Ref::new(FIRST_PAGE + 2 * index as i32)
}

fn write_page(pdf: &mut Pdf, index: usize, rows: &[(i32, &[Glyph])], footer: &[Glyph]) {
    let mut content = Content::new();
    content.begin_text();
    content.set_font(FONT_KEY, SIZE as f32);
    let mut height = PAGE_HEIGHT - MARGIN - SIZE;
    for (indent, row) in rows {
        show(&mut content, MARGIN + indent, height, row);
        height -= LEADING;
    }
    content.set_font(FONT_KEY, FOOTER_SIZE as f32);
    show(&mut content, MARGIN, FOOTER_HEIGHT, footer);
    content.end_text();
    let (page, stream) = (page_ref(index), Ref::new(page_ref(index).get() + 1));
    let data = compressed(&content.finish());
    pdf.stream(stream, &data).filter(Filter::FlateDecode);
    let mut page = pdf.page(page);
    page.parent(PAGES).contents(stream);
    page.media_box(Rect::new(0.0, 0.0, PAGE_WIDTH as f32, PAGE_HEIGHT as f32));
    page.resources().fonts().pair(FONT_KEY, TYPE0_FONT);
}

fn show(content: &mut Content, x: i32, y: i32, row: &[Glyph]) {
    let codes: Vec<u8> = row
        .iter()
        .flat_map(|glyph| glyph.id.to_be_bytes())
        .collect();
    content.set_text_matrix([1.0, 0.0, 0.0, 1.0, x as f32, y as f32]);
    content.show(Str(&codes));
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

/// The rows of a line, each with its indent in points. A row ends after the last space that fits;
/// a longer word is split. Together they have all glyphs of the line.
fn wrapped(line: &[Glyph]) -> Vec<(i32, &[Glyph])> {
    let (mut rows, mut rest) = (Vec::new(), line);
    let (mut indent, mut limit) = (0, LINE_UNITS);
    loop {
        let fits = fitting(rest, limit);
        if fits == rest.len() {
            rows.push((indent, rest));
            return rows;
        }
        // A space may end beyond the margin.
        let space = rest[..=fits].iter().rposition(|glyph| glyph.of == ' ');
        let end = space.map_or(fits.max(1), |at| at + 1);
        let (row, after) = rest.split_at(end);
        rows.push((indent, row));
        if after.is_empty() {
            return rows;
        }
        rest = after;
        (indent, limit) = (INDENT, LINE_UNITS - INDENT_UNITS);
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
    use sha2::{Digest as _, Sha256};

    use super::*;
    use crate::extract::glyphs::FONT_SHA256;

    fn text(glyphs: &[Glyph]) -> String {
        glyphs.iter().map(|glyph| glyph.of).collect()
    }

    #[test]
    fn the_table_of_glyphs_is_that_of_the_font() {
        assert_eq!(hex::encode(Sha256::digest(FONT)), FONT_SHA256);
        assert!(GLYPHS.is_sorted_by(|a, b| a.0 < b.0));
        assert!(GLYPHS.iter().all(|(_, _, width)| *width > 0));
        // Each character has a glyph of its own, so a glyph maps to one character.
        let ids: std::collections::BTreeSet<u16> = GLYPHS.iter().map(|(_, id, _)| *id).collect();
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
    fn rows_fit_the_page_and_keep_every_character() {
        let words = "дело № 2-17/2026 ".repeat(40);
        let long = "щ".repeat(500);
        for line in ["", "a", &words, &long, &format!("- {long} {words}")] {
            let line = glyphs(line);
            let rows = wrapped(&line);
            let together: Vec<Glyph> = rows.iter().flat_map(|(_, row)| row.to_vec()).collect();
            assert_eq!(together, line);
            for (indent, row) in rows {
                let shown = text(row);
                let width: i32 = glyphs(shown.trim_end())
                    .iter()
                    .map(|glyph| glyph.width)
                    .sum();
                assert!(
                    width + indent * UNITS_PER_EM / SIZE <= LINE_UNITS,
                    "{shown}"
                );
            }
        }
        // Words are whole where they can be.
        let line = glyphs(&words);
        let rows = wrapped(&line);
        assert!(rows.len() > 1 && rows.iter().all(|(_, row)| text(row).ends_with(' ')));
    }

    #[test]
    fn the_same_lines_make_the_same_bytes() {
        let lines = vec!["Выписка".to_owned(); 200];
        let first = document("Выписка 1", "1", &lines);
        assert_eq!(first, document("Выписка 1", "1", &lines));
        assert_ne!(first, document("Выписка 2", "2", &lines));
    }
}
