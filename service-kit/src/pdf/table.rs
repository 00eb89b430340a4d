//! A list as a table in English: a heading, then the rows, with the names of the columns on each
//! page.
//!
//! The first rows decide the size of the pages and the widths of the columns. Text that is wider
//! than its column continues below. The pages are A4, upright if the table is narrow, and A3 if it
//! has very many columns. Meant for up to some 50 columns. The cost of a row is that of its text;
//! memory is that of the finished pages, compressed.

use super::glyphs::UNITS_PER_EM;
use super::{Glyph, Pages, glyphs, wrapped};

// Lengths in points.
const MARGIN: i32 = 36;
const FOOTER_SIZE: i32 = 7;
const FOOTER_HEIGHT: i32 = 20;
const TITLE_SIZE: i32 = 12;
/// Lines that the title takes.
const TITLE_LINES: usize = 2;
/// Space between columns.
const GAP: i32 = 6;
/// Depth of the line under a row below the row's text.
const RULE_DEPTH: i32 = 3;
/// Widths of the lines under the names of the columns and under a row.
const HEAD_RULE: f32 = 1.0;
const ROW_RULE: f32 = 0.25;

/// A page is large enough if each column has its whole width or this one, in units of the font:
/// half of a UUID.
const WHOLE_UNITS: i32 = 12 * UNITS_PER_EM;
/// Bound of a measured width: wider than any page.
const UNITS_MAX: i32 = 500 * UNITS_PER_EM;

const _: () = assert!(FOOTER_HEIGHT + FOOTER_SIZE < MARGIN);

/// Size of the pages and of their text, in points.
struct Layout {
    width: i32,
    height: i32,
    size: i32,
}

static LAYOUTS: [Layout; 4] = [
    Layout::new(595, 842, 8),
    Layout::new(842, 595, 8),
    Layout::new(842, 595, 6),
    Layout::new(1191, 842, 6),
];

impl Layout {
    const fn new(width: i32, height: i32, size: i32) -> Self {
        Self {
            width,
            height,
            size,
        }
    }

    /// The smallest one that shows `columns` of these widths, in units of the font.
    fn of(columns: &[i32]) -> &'static Self {
        let fits = |layout: &&Self| {
            let widths = columns.iter().map(|units| (*units).min(WHOLE_UNITS));
            let total: i32 = widths.map(|units| layout.points(units)).sum();
            total <= layout.room(columns.len())
        };
        let [.., last] = &LAYOUTS;
        LAYOUTS.iter().find(fits).unwrap_or(last)
    }

    fn leading(&self) -> i32 {
        self.size + 3
    }

    /// Number of lines of a page.
    fn lines(&self) -> usize {
        ((self.height - 2 * MARGIN) / self.leading()) as usize
    }

    /// Height of the text of the line that has `below` lines below it.
    fn baseline(&self, below: usize) -> i32 {
        MARGIN + below as i32 * self.leading()
    }

    /// Left and right end of a line.
    fn ends(&self) -> (i32, i32) {
        (MARGIN, self.width - MARGIN)
    }

    /// Width of the text of this number of columns.
    fn room(&self, columns: usize) -> i32 {
        self.width - 2 * MARGIN - GAP * (columns as i32 - 1)
    }

    /// Units of the font in points, rounded up.
    fn points(&self, units: i32) -> i32 {
        (units * self.size + UNITS_PER_EM - 1) / UNITS_PER_EM
    }

    fn units(&self, points: i32) -> i32 {
        points * UNITS_PER_EM / self.size
    }
}

/// Text in a column: its left end and its lines.
struct Cell {
    x: i32,
    lines: Vec<Vec<Glyph>>,
}

/// A table that is written row by row.
pub struct Table {
    pages: Pages,
    layout: &'static Layout,
    title: String,
    /// Left ends and widths of the columns, in points.
    columns: Vec<(i32, i32)>,
    /// The names of the columns; empty while the heading is written.
    head: Vec<Cell>,
    /// Lines that the page has left.
    free: usize,
    /// Number of rows.
    count: u64,
}

impl Table {
    /// A table without rows. `title` is short, and is also at the bottom of each page, with the
    /// page's number. `notes` are lines below the title. `id` is the document's identifier. The
    /// widths are chosen for the columns' `names` and the rows of `sample`, which are not added.
    pub fn new(
        title: &str,
        id: &str,
        notes: &[String],
        names: &[&str],
        sample: &[Vec<String>],
    ) -> Self {
        let units = names.iter().enumerate().map(|(at, name)| {
            let cells = sample.iter().filter_map(|row| row.get(at));
            wanted(name, cells)
        });
        let units: Vec<i32> = units.collect();
        let layout = Layout::of(&units);
        let points: Vec<i32> = units.iter().map(|units| layout.points(*units)).collect();
        let mut columns = Vec::with_capacity(names.len());
        let mut x = MARGIN;
        for width in narrowed(&points, layout.room(names.len())) {
            columns.push((x, width));
            x += width + GAP;
        }
        let mut table = Self {
            pages: Pages::new(title, id, "en", (layout.width, layout.height)),
            layout,
            title: title.to_owned(),
            columns,
            head: Vec::new(),
            free: layout.lines() - TITLE_LINES,
            count: 0,
        };
        let shown = glyphs(title);
        let place = (MARGIN, layout.baseline(table.free), shown.as_slice());
        table.pages.text(TITLE_SIZE, [place]);
        for note in notes {
            table.note(note);
        }
        // An empty line.
        table.free = table.free.saturating_sub(1);
        table.head = table.cells(names);
        match table.free > height(&table.head) {
            true => table.put_head(),
            false => table.turn_page(),
        }
        table
    }

    /// Adds a row.
    ///
    /// # Panics
    /// If the row does not have a text per column.
    pub fn push(&mut self, row: &[String]) {
        assert_eq!(row.len(), self.columns.len(), "a text per column");
        let row: Vec<&str> = row.iter().map(String::as_str).collect();
        let cells = self.cells(&row);
        self.add(&cells);
        self.rule(ROW_RULE);
        self.count += 1;
    }

    /// The document, with the number of rows at its end.
    pub fn finish(mut self) -> Vec<u8> {
        self.note(&format!("Rows: {}", self.count));
        self.pages.end_page();
        let title = self.title;
        let place = (MARGIN, FOOTER_HEIGHT);
        self.pages.finish(place, FOOTER_SIZE, |page, of| {
            format!("{title}, page {page} of {of}")
        })
    }

    /// Adds text across all columns.
    fn note(&mut self, text: &str) {
        let (left, right) = self.layout.ends();
        let lines = lines(text, self.layout.units(right - left));
        self.add(&[Cell { x: left, lines }]);
    }

    fn cells(&self, texts: &[&str]) -> Vec<Cell> {
        let columns = self.columns.iter().zip(texts);
        let cells = columns.map(|((x, width), text)| Cell {
            x: *x,
            lines: lines(text, self.layout.units(*width)),
        });
        cells.collect()
    }

    /// Adds cells side by side. They are divided only if they do not fit a page.
    fn add(&mut self, cells: &[Cell]) {
        let lines = height(cells);
        let page = self.layout.lines().saturating_sub(height(&self.head));
        if lines > self.free && lines <= page {
            self.turn_page();
        }
        let mut from = 0;
        while from < lines {
            if self.free == 0 {
                self.turn_page();
            }
            let until = lines.min(from + self.free);
            self.put(cells, from, until);
            from = until;
        }
    }

    /// Shows the lines of the cells from `from` to `until`, for which the page has room.
    fn put(&mut self, cells: &[Cell], from: usize, until: usize) {
        let (layout, free) = (self.layout, self.free);
        let rows = cells.iter().flat_map(|cell| {
            let lines = cell.lines.iter().enumerate().take(until).skip(from);
            let shown = lines.filter(|(_, line)| !line.is_empty());
            shown.map(move |(at, line)| {
                let below = free - 1 - (at - from);
                (cell.x, layout.baseline(below), line.as_slice())
            })
        });
        self.pages.text(layout.size, rows);
        self.free -= until - from;
    }

    /// Shows the names of the columns. A line of the page stays free.
    fn put_head(&mut self) {
        let head = std::mem::take(&mut self.head);
        let lines = height(&head).min(self.free - 1);
        if lines > 0 {
            self.put(&head, 0, lines);
            self.rule(HEAD_RULE);
        }
        self.head = head;
    }

    /// Draws a line under the last row.
    fn rule(&mut self, width: f32) {
        let y = self.layout.baseline(self.free) - RULE_DEPTH;
        self.pages.rule(self.layout.ends(), y, width);
    }

    fn turn_page(&mut self) {
        self.pages.end_page();
        self.free = self.layout.lines();
        self.put_head();
    }
}

/// Width at which a column divides neither a cell nor a word of its name, in units of the font.
fn wanted<'a>(name: &str, cells: impl Iterator<Item = &'a String>) -> i32 {
    let width = |glyphs: &[Glyph]| {
        let widths = glyphs.iter().map(|glyph| glyph.width);
        widths.fold(0, i32::saturating_add).min(UNITS_MAX)
    };
    let name = glyphs(name);
    let words = name.split_inclusive(|glyph| may_end(glyph.of)).map(width);
    let cells = cells.map(|cell| width(&glyphs(cell)));
    words.chain(cells).max().unwrap_or(0)
}

/// Widths that are together at most `room`, if it has a point per column: the wanted ones, of which
/// the widest are narrowed to a common limit.
fn narrowed(wanted: &[i32], room: i32) -> Vec<i32> {
    let at_most = |limit: i32| wanted.iter().map(move |width| (*width).min(limit).max(1));
    let fits = |limit: &i32| at_most(*limit).sum::<i32>() <= room;
    let limit = (1..=room).rev().find(fits).unwrap_or(1);
    at_most(limit).collect()
}

/// The text in lines of at most `limit` units.
fn lines(text: &str, limit: i32) -> Vec<Vec<Glyph>> {
    let line = glyphs(text);
    let rows = wrapped(&line, [limit, limit], may_end).into_iter();
    rows.map(<[Glyph]>::to_vec).collect()
}

/// True if a line may end after this character: in texts, names of columns, ids and times.
fn may_end(of: char) -> bool {
    matches!(of, ' ' | '_' | '-' | '.' | ',' | ':' | '/')
}

/// Number of lines of the highest cell.
fn height(cells: &[Cell]) -> usize {
    let heights = cells.iter().map(|cell| cell.lines.len());
    heights.max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use testkit::pdf;

    use super::*;

    fn row(cells: &[&str]) -> Vec<String> {
        cells.iter().map(|cell| (*cell).to_owned()).collect()
    }

    fn table(names: &[&str], rows: &[Vec<String>]) -> Vec<u8> {
        let notes = row(&["user_id: anna", "Made: 2026-11-30T10:00:00Z"]);
        let mut table = Table::new("holders list", "1", &notes, names, rows);
        rows.iter().for_each(|row| table.push(row));
        table.finish()
    }

    #[test]
    fn f38_a_table_has_its_heading_its_rows_and_their_number() {
        let rows = [row(&["Анна Ёлкина", "1.50"]), row(&["中 \\ (b)", ""])];
        let document = table(&["name", "balance"], &rows);
        let pages = pdf::pages(&document);
        assert_eq!(pages.len(), 1);
        // The font has no Chinese characters.
        assert_eq!(
            pages[0].text,
            "holders listuser_id: annaMade: 2026-11-30T10:00:00Znamebalance\
             Анна Ёлкина1.50\\u{4e2d} \\ (b)Rows: 2holders list, page 1 of 1"
        );
        assert_eq!(pages[0].size, (595, 842));
        assert_eq!(document, table(&["name", "balance"], &rows));
    }

    #[test]
    fn f38_each_page_has_the_names_of_the_columns_and_its_number() {
        let rows: Vec<Vec<String>> = (0..100).map(|n| row(&[&format!("row {n};")])).collect();
        let pages = pdf::pages(&table(&["name"], &rows));
        assert_eq!(pages.len(), 2);
        assert!(pages[1].text.starts_with("namerow "), "{}", pages[1].text);
        for (index, page) in pages.iter().enumerate() {
            let number = format!("holders list, page {} of 2", index + 1);
            assert!(page.text.ends_with(&number), "{}", page.text);
            let (footer, rows) = page.heights.split_last().expect("a footer");
            assert!(*footer == FOOTER_HEIGHT && rows.is_sorted_by(|above, below| above > below));
            assert!(rows.iter().all(|row| (MARGIN..=842 - MARGIN).contains(row)));
        }
        let text = format!("{}{}", pages[0].text, pages[1].text);
        assert!((0..100).all(|n| text.matches(&format!("row {n};")).count() == 1));
        assert!(text.contains("Rows: 100"), "{text}");
    }

    #[test]
    fn f38_a_table_without_rows_is_a_page() {
        let pages = pdf::pages(&table(&["name"], &[]));
        assert_eq!(pages.len(), 1);
        assert!(pages[0].text.contains("nameRows: 0"), "{}", pages[0].text);
    }

    #[test]
    fn f38_many_columns_turn_the_page_and_wide_text_continues_below() {
        let id = "019af3c2-5b1e-7c3a-9d2f-0a1b2c3d4e5f";
        let names: Vec<String> = (0..37).map(|n| format!("outer.column_{n}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        for (columns, size) in [(2, (595, 842)), (6, (842, 595)), (37, (1191, 842))] {
            let rows = [vec![id.to_owned(); columns]];
            let pages = pdf::pages(&table(&names[..columns], &rows));
            assert_eq!(pages[0].size, size, "{columns}");
            assert_eq!(pages[0].text.matches(id).count(), columns, "{columns}");
        }
    }

    #[test]
    fn f38_a_row_is_divided_only_if_it_is_longer_than_a_page() {
        let short = vec![row(&["a"]); 60];
        let text = "слово ".repeat(40);
        let long = "слово ".repeat(2_000);
        for (cell, is_whole) in [(&text, true), (&long, false)] {
            let mut table = Table::new("t", "1", &[], &["description"], &short);
            short.iter().for_each(|row| table.push(row));
            table.push(&row(&[cell]));
            let pages = pdf::pages(&table.finish());
            let words = pages.iter().map(|page| page.text.matches("слово").count());
            let words: Vec<usize> = words.collect();
            assert_eq!(words.iter().sum::<usize>(), cell.matches("слово").count());
            assert_eq!(words[0] == 0, is_whole, "{words:?}");
        }
    }

    #[test]
    fn f38_the_widest_columns_are_narrowed_to_one_limit() {
        assert_eq!(narrowed(&[10, 20, 30], 60), [10, 20, 30]);
        assert_eq!(narrowed(&[10, 20, 30], 50), [10, 20, 20]);
        assert_eq!(narrowed(&[10, 50, 50], 50), [10, 20, 20]);
        assert_eq!(narrowed(&[0, 5], 0), [1, 1]);
        assert!(narrowed(&[], 10).is_empty());
    }
}
