//! Lines of text as an A4 document in Russian.
//!
//! A line wider than the page continues on the next one, with an indent.

use super::glyphs::UNITS_PER_EM;
use super::{Glyph, Pages, glyphs, wrapped};

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

/// The document of `lines`, with `title` and the number of the page, in Russian, at the bottom of
/// each page. `id` is the document's identifier.
pub fn document(title: &str, id: &str, lines: &[String]) -> Vec<u8> {
    let lines: Vec<Vec<Glyph>> = lines.iter().map(|line| glyphs(line)).collect();
    let rows: Vec<(i32, &[Glyph])> = lines.iter().flat_map(|line| indented(line)).collect();
    let mut pages = Pages::new(title, id, "ru-RU", (PAGE_WIDTH, PAGE_HEIGHT));
    for rows in rows.chunks(LINES_PER_PAGE) {
        let heights = (0..).map(|line| PAGE_HEIGHT - MARGIN - SIZE - line * LEADING);
        let rows = rows.iter().zip(heights);
        let placed = rows.map(|((indent, row), height)| (MARGIN + indent, height, *row));
        pages.text(SIZE, placed);
        pages.end_page();
    }
    pages.finish((MARGIN, FOOTER_HEIGHT), FOOTER_SIZE, |page, of| {
        format!("{title}, страница {page} из {of}")
    })
}

/// The rows of a line, each with its indent in points.
fn indented(line: &[Glyph]) -> Vec<(i32, &[Glyph])> {
    let limits = [LINE_UNITS, LINE_UNITS - INDENT_UNITS];
    let rows = wrapped(line, limits, |of| of == ' ').into_iter();
    let indents = std::iter::once(0).chain(std::iter::repeat(INDENT));
    indents.zip(rows).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_lines_make_the_same_bytes() {
        let lines = vec!["Выписка".to_owned(); 200];
        let first = document("Выписка 1", "1", &lines);
        assert_eq!(first, document("Выписка 1", "1", &lines));
        assert_ne!(first, document("Выписка 2", "2", &lines));
    }
}
