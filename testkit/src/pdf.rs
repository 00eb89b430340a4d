//! Reads a PDF of the platform from outside: by its cross-reference table and tree of pages, and
//! the characters by the font's map to Unicode.

use std::collections::BTreeMap;

/// A page. Lengths are in points.
pub struct Page {
    /// Width and height.
    pub size: (i32, i32),
    /// The text without line ends.
    pub text: String,
    /// The height of each row of text above the lower edge, in the order of the text.
    pub heights: Vec<i32>,
}

/// The pages of a document that `service_kit::pdf` made.
///
/// # Panics
/// If the file is not such a document.
pub fn pages(file: &[u8]) -> Vec<Page> {
    assert!(file.starts_with(b"%PDF-1.7\n") && file.ends_with(b"%%EOF"));
    let objects = objects(file);
    let catalog = field(trailer(file), "/Root");
    let tree = dictionary(&objects[&field(dictionary(&objects[&catalog]), "/Pages")]);
    let kids = references(tree, "/Kids[");
    assert_eq!(kids.len(), field(tree, "/Count"));
    kids.iter().map(|kid| page(&objects, *kid)).collect()
}

/// The objects by number. Each must be where the cross-reference table has it.
fn objects(file: &[u8]) -> BTreeMap<usize, Vec<u8>> {
    let table = &file[field(trailer(file), "startxref")..];
    let table = String::from_utf8_lossy(&table[..find(table, b"trailer")]).into_owned();
    let mut lines = table.lines().skip(2).enumerate();
    assert!(lines.next().expect("entry 0").1.ends_with('f'));
    let objects = lines.map(|(number, entry)| {
        let offset = first_number(entry).expect("offset");
        let start = format!("{number} 0 obj\n");
        assert!(
            file[offset..].starts_with(start.as_bytes()),
            "object {number}"
        );
        let object = &file[offset + start.len()..];
        let end = find(object, b"\nendobj\n");
        (number, object[..end].to_vec())
    });
    objects.collect()
}

fn page(objects: &BTreeMap<usize, Vec<u8>>, number: usize) -> Page {
    let own = dictionary(&objects[&number]);
    let font = dictionary(&objects[&field(own, "/F1")]);
    let characters = characters(&stream(&objects[&field(font, "/ToUnicode")]));
    let streams = references(own, "/Contents[");
    let streams = streams.iter().map(|number| stream(&objects[number]));
    let content = streams.collect::<Vec<_>>().join(&b'\n');
    let mut text = String::new();
    for codes in strings(&content) {
        let codes = codes
            .chunks(2)
            .map(|code| u16::from_be_bytes([code[0], code[1]]));
        text.extend(codes.map(|code| characters[&code]));
    }
    let content = String::from_utf8_lossy(&content);
    let rows = content.lines().filter_map(|line| line.strip_suffix(" Tm"));
    let heights = rows.map(|row| row.rsplit(' ').next().expect("height").parse::<i32>());
    Page {
        size: size(own),
        text,
        heights: heights
            .collect::<Result<Vec<i32>, _>>()
            .expect("whole points"),
    }
}

/// Width and height of a page whose lower left corner is the origin.
fn size(page: &str) -> (i32, i32) {
    let (_, sizes) = page.split_once("/MediaBox[0 0 ").expect("size");
    let (sizes, _) = sizes.split_once(']').expect("end of the size");
    let (width, height) = sizes.split_once(' ').expect("width and height");
    let points = |text: &str| text.parse::<i32>().expect("whole points");
    (points(width), points(height))
}

/// Numbers of the objects in the list after `name`.
fn references(dictionary: &str, name: &str) -> Vec<usize> {
    let (_, list) = dictionary.split_once(name).expect("list");
    let (list, _) = list.split_once(']').expect("end of the list");
    list.split("0 R").filter_map(first_number).collect()
}

fn characters(map: &[u8]) -> BTreeMap<u16, char> {
    let map = String::from_utf8_lossy(map);
    let sections = map.split("beginbfchar\n").skip(1);
    let lines = sections.flat_map(|section| {
        let (lines, _) = section.split_once("endbfchar").expect("end of the section");
        lines.lines()
    });
    let pairs = lines.map(|line| {
        let pair = line
            .strip_prefix('<')
            .and_then(|line| line.strip_suffix('>'));
        let (code, character) = pair.and_then(|pair| pair.split_once("> <")).expect("pair");
        let code = u16::from_str_radix(code, 16).expect("code");
        let character = u32::from_str_radix(character, 16).expect("character");
        (code, char::from_u32(character).expect("character"))
    });
    pairs.collect()
}

/// The strings of a content, all of which are shown.
fn strings(content: &[u8]) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    let mut bytes = content.iter().copied();
    while let Some(byte) = bytes.next() {
        match byte {
            b'(' => found.push(literal(&mut bytes)),
            b'<' => {
                let digits: Vec<u8> = bytes.by_ref().take_while(|byte| *byte != b'>').collect();
                found.push(hex::decode(digits).expect("digits"));
            }
            _ => {}
        }
    }
    found
}

fn literal(bytes: &mut impl Iterator<Item = u8>) -> Vec<u8> {
    let (mut found, mut depth) = (Vec::new(), 1);
    loop {
        let byte = bytes.next().expect("end of the string");
        match byte {
            b'\\' => {
                found.push(escaped(bytes));
                continue;
            }
            b'(' => depth += 1,
            b')' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return found;
        }
        found.push(byte);
    }
}

fn escaped(bytes: &mut impl Iterator<Item = u8>) -> u8 {
    match bytes.next().expect("escaped byte") {
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'b' => 8,
        b'f' => 12,
        digit @ b'0'..=b'7' => {
            let digits = bytes.take(2);
            digits.fold(digit - b'0', |value, digit| value * 8 + (digit - b'0'))
        }
        other => other,
    }
}

/// The decompressed stream of an object.
fn stream(object: &[u8]) -> Vec<u8> {
    let start = find(object, b"\nstream\n") + b"\nstream\n".len();
    let length = field(dictionary(object), "/Length");
    let data = &object[start..start + length];
    assert_eq!(&object[start + length..], b"\nendstream");
    miniz_oxide::inflate::decompress_to_vec_zlib(data).expect("compressed")
}

/// The object without its stream.
fn dictionary(object: &[u8]) -> &str {
    let end = (0..object.len()).find(|at| object[*at..].starts_with(b"\nstream\n"));
    std::str::from_utf8(&object[..end.unwrap_or(object.len())]).expect("text")
}

fn trailer(file: &[u8]) -> &str {
    let start = (0..file.len()).rfind(|at| file[*at..].starts_with(b"trailer\n"));
    std::str::from_utf8(&file[start.expect("trailer")..]).expect("text")
}

/// The number after `name`.
fn field(dictionary: &str, name: &str) -> usize {
    let found = dictionary
        .split_once(name)
        .and_then(|(_, after)| first_number(after));
    found.unwrap_or_else(|| panic!("no {name} in {dictionary}"))
}

fn first_number(text: &str) -> Option<usize> {
    let text = text.trim_start();
    let end = text.find(|digit: char| !digit.is_ascii_digit());
    text[..end.unwrap_or(text.len())].parse().ok()
}

fn find(bytes: &[u8], wanted: &[u8]) -> usize {
    let found = bytes
        .windows(wanted.len())
        .position(|window| window == wanted);
    found.expect("found")
}
