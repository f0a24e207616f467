//! What was meant, perhaps.

/// The name with the fewest letters to change.
pub fn nearest<'a>(word: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    names.into_iter().min_by_key(|name| distance(word, name))
}

/// Insertions, deletions and replacements from one word to the other.
pub fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, left) in a.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, right) in b.bytes().enumerate() {
            let cost = (diagonal + usize::from(left != right)).min(row[j] + 1).min(row[j + 1] + 1);
            diagonal = std::mem::replace(&mut row[j + 1], cost);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fewest_changes_win() {
        assert_eq!(nearest("chekcs", ["packages", "checks", "apps"]), Some("checks"));
        assert_eq!(nearest("x", []), None);
    }
}
