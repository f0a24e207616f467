//! What is in a NAR, in the form of Nix's `.ls` files, version 1, compressed while it is written.
//!
//! JSON has no words for names that are not UTF-8. Nix 2.8 writes their bytes as they are, which no JSON parser takes;
//! later ones fail on them and publish nothing. Here each bad sequence becomes U+FFFD, as in any lossy decoding, and if the
//! directory has that name already, a number follows: `a�`, `a�2`, `a�3`. Such a file is listed with its true
//! offset and size; only the NAR has its name.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::io::{self, Write};

use zstd::stream::write::Encoder;

use super::LEVEL;
use super::compress::{Compressed, compress};

/// JSON that waits to be compressed.
const BUFFER: usize = 64 << 10;

/// A listing that is being written.
pub(super) struct Listing {
    json: Vec<u8>,
    /// Once there is more than fits the buffer.
    encoder: Option<Encoder<'static, Vec<u8>>>,
    failure: Option<io::Error>,
    /// For each open directory: whether it has an entry already.
    begun: Vec<bool>,
}

impl Default for Listing {
    fn default() -> Self {
        Self { json: br#"{"version":1,"root":"#.to_vec(), encoder: None, failure: None, begun: Vec::new() }
    }
}

impl Listing {
    pub fn start_directory(&mut self, name: Option<&str>) {
        self.name(name);
        self.json.extend_from_slice(br#"{"type":"directory","entries":{"#);
        self.begun.push(false);
    }

    pub fn end_directory(&mut self) {
        self.begun.pop();
        self.json.extend_from_slice(b"}}");
    }

    pub fn regular(&mut self, name: Option<&str>, size: u64, executable: bool, offset: u64) {
        self.name(name);
        let executable = if executable { r#""executable":true,"# } else { "" };
        let entry = format!(r#"{{"type":"regular","size":{size},{executable}"narOffset":{offset}}}"#);
        self.json.extend_from_slice(entry.as_bytes());
    }

    pub fn symlink(&mut self, name: Option<&str>, target: &[u8]) {
        self.name(name);
        self.json.extend_from_slice(br#"{"type":"symlink","target":"#);
        self.string(&String::from_utf8_lossy(target));
        self.json.push(b'}');
    }

    /// The compressed JSON.
    pub fn finish(mut self) -> io::Result<Compressed> {
        self.json.push(b'}');
        if self.encoder.is_none() {
            return compress(&self.json, LEVEL);
        }
        self.spill();
        match (self.failure, self.encoder) {
            (None, Some(encoder)) => Ok(Compressed::new(encoder.finish()?)),
            (failure, _) => Err(failure.unwrap_or_else(|| io::ErrorKind::Other.into())),
        }
    }

    fn name(&mut self, name: Option<&str>) {
        if self.json.len() > BUFFER {
            self.spill();
        }
        if let Some(begun) = self.begun.last_mut()
            && std::mem::replace(begun, true)
        {
            self.json.push(b',');
        }
        if let Some(name) = name {
            self.string(name);
            self.json.push(b':');
        }
    }

    fn string(&mut self, text: &str) {
        let failure = serde_json::to_writer(&mut self.json, text).err();
        self.failure = self.failure.take().or(failure.map(io::Error::from));
    }

    fn spill(&mut self) {
        let written = match &mut self.encoder {
            Some(encoder) => encoder.write_all(&self.json),
            None => Encoder::new(Vec::new(), LEVEL)
                .and_then(|encoder| self.encoder.insert(encoder).write_all(&self.json)),
        };
        self.failure = self.failure.take().or(written.err());
        self.json.clear();
    }
}

/// The names of one directory.
pub(super) struct Names<'a> {
    /// Those that a replacement must not be equal to: all, in order, if one of them needs a replacement.
    real: Vec<&'a [u8]>,
    replacements: HashSet<String>,
    /// The next number for each name that others are decoded to.
    next: HashMap<String, u32>,
}

impl<'a> Names<'a> {
    /// Of names in ascending order.
    pub fn new(names: impl Iterator<Item = &'a [u8]> + Clone) -> Self {
        let foreign = names.clone().any(|name| std::str::from_utf8(name).is_err());
        let real = if foreign { names.collect() } else { Vec::new() };
        Self { real, replacements: HashSet::new(), next: HashMap::new() }
    }

    /// What a name is called in the listing.
    pub fn listed<'b>(&mut self, name: &'b [u8]) -> Cow<'b, str> {
        match String::from_utf8_lossy(name) {
            Cow::Borrowed(name) => Cow::Borrowed(name),
            Cow::Owned(decoded) => Cow::Owned(self.replacement(decoded)),
        }
    }

    /// Numbers are not given out twice, so that many names that are decoded alike cost no more than others.
    fn replacement(&mut self, decoded: String) -> String {
        let next = self.next.entry(decoded.clone()).or_insert(1);
        let mut replacement = decoded.clone();
        if *next > 1 {
            replacement = format!("{decoded}{next}");
        }
        while self.real.binary_search(&replacement.as_bytes()).is_ok()
            || self.replacements.contains(&replacement)
        {
            *next += 1;
            replacement = format!("{decoded}{next}");
        }
        *next += 1;
        self.replacements.insert(replacement.clone());
        replacement
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_not_utf8_are_listed_under_names_of_their_own() {
        let names: [&[u8]; 4] = [b"a\xfe", b"a\xff", "a\u{fffd}".as_bytes(), b"b"];
        let mut sorted = names.to_vec();
        sorted.sort_unstable();
        let mut listed = Names::new(sorted.into_iter());
        let listed: Vec<_> = names.iter().map(|name| listed.listed(name).into_owned()).collect();
        assert_eq!(listed, ["a\u{fffd}2", "a\u{fffd}3", "a\u{fffd}", "b"]);
    }

    #[test]
    fn a_number_that_a_real_name_has_is_left_out() {
        let names: [&[u8]; 4] = ["a\u{fffd}2".as_bytes(), b"a\xfd", b"a\xfe", b"a\xff2"];
        let mut sorted = names.to_vec();
        sorted.sort_unstable();
        let mut listed = Names::new(sorted.into_iter());
        let listed: Vec<_> = names.iter().map(|name| listed.listed(name).into_owned()).collect();
        assert_eq!(listed, ["a\u{fffd}2", "a\u{fffd}", "a\u{fffd}3", "a\u{fffd}22"]);
    }

    #[test]
    fn many_names_that_are_decoded_alike_are_listed_soon() {
        // Bytes that only ever continue a character.
        let mut names = Vec::new();
        for number in 0..1u32 << 17 {
            names.push([0, 6, 12].map(|shift| 0x80 | (number >> shift) as u8 & 0x3f));
        }
        names.sort_unstable();
        let mut listed = Names::new(names.iter().map(|name| name.as_slice()));
        let distinct: HashSet<String> = names.iter().map(|name| listed.listed(name).into_owned()).collect();
        assert_eq!(distinct.len(), names.len());
        assert!(distinct.iter().all(|name| name.len() <= 9 + 6));
    }

    #[test]
    fn a_listing_that_outgrows_its_buffer_is_the_same_json() {
        let mut listing = Listing::default();
        listing.start_directory(None);
        for number in 0..5000 {
            listing.regular(Some(&format!("file-{number:04}")), number, false, number * 8);
        }
        listing.end_directory();
        assert!(listing.encoder.is_some());
        let json = zstd::decode_all(&listing.finish().unwrap().bytes[..]).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&json).unwrap();
        assert_eq!(value["root"]["entries"].as_object().unwrap().len(), 5000);
        assert_eq!(value["root"]["entries"]["file-4999"]["narOffset"], 4999 * 8);
    }
}
