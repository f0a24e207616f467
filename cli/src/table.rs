//! Tables that fit a terminal.

use std::io::IsTerminal;

use crate::style;

/// Between two columns.
const GAP: &str = "  ";
/// A column that has to give way keeps this much.
const LEAST: usize = 8;

/// Rows of the same length under a head. The widest columns are cut where a line would not fit `width`; the last one is
/// never padded.
pub fn table(head: &[&str], rows: &[Vec<String>], width: Option<usize>) -> String {
    // What is in them is often somebody else's word, and a table has one line a row.
    let cell = |cell: &String| style::plain(cell).replace(['\n', '\t'], " ");
    let rows: Vec<Vec<String>> = rows.iter().map(|row| row.iter().map(cell).collect()).collect();
    let mut widths: Vec<usize> = head.iter().map(|word| length(word)).collect();
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(length(cell));
        }
    }
    if let Some(width) = width {
        shrink(&mut widths, width);
    }
    let head: Vec<String> = head.iter().map(|&word| word.to_owned()).collect();
    let mut text = String::new();
    for row in std::iter::once(&head).chain(&rows) {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, &width)| fit(cell, width)).collect();
        text += cells.join(GAP).trim_end();
        text.push('\n');
    }
    text
}

/// The width of the terminal that is written to; none if it is not one.
pub fn width() -> Option<usize> {
    let out = std::io::stdout();
    if !out.is_terminal() {
        return None;
    }
    let size = rustix::termios::tcgetwinsize(out).ok()?;
    Some(usize::from(size.ws_col)).filter(|&columns| columns > 0)
}

/// Takes from the widest column until all fit, or nothing is left to take.
fn shrink(widths: &mut [usize], most: usize) {
    let gaps = GAP.len() * widths.len().saturating_sub(1);
    while widths.iter().sum::<usize>() + gaps > most {
        match widths.iter_mut().max() {
            Some(widest) if *widest > LEAST => *widest -= 1,
            _ => return,
        }
    }
}

fn fit(cell: &str, width: usize) -> String {
    if length(cell) <= width {
        return format!("{cell:width$}");
    }
    let kept: String = cell.chars().take(width.saturating_sub(1)).collect();
    kept + "…"
}

fn length(text: &str) -> usize {
    text.chars().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(rows: &[&[&str]]) -> Vec<Vec<String>> {
        rows.iter().map(|row| row.iter().map(|&cell| cell.to_owned()).collect()).collect()
    }

    #[test]
    fn columns_are_as_wide_as_what_is_in_them() {
        let text = table(&["ID", "NAME"], &rows(&[&["1", "one"], &["100", "é"]]), None);
        assert_eq!(text, "ID   NAME\n1    one\n100  é\n");
    }

    #[test]
    fn a_cell_stays_in_its_line_and_moves_no_cursor() {
        let text = table(&["NAME"], &rows(&[&["a\nb\u{1b}[2Jc"]]), None);
        assert_eq!(text, "NAME\na b\u{fffd}[2Jc\n");
    }

    #[test]
    fn the_widest_column_gives_way() {
        let text = table(&["ID", "NAME"], &rows(&[&["1", "a-rather-long-name"]]), Some(14));
        assert_eq!(text, "ID  NAME\n1   a-rather-…\n");
        assert!(text.lines().all(|line| line.chars().count() <= 14));
    }

    #[test]
    fn on_a_tiny_terminal_something_is_left() {
        let text = table(&["NAME"], &rows(&[&["a-rather-long-name"]]), Some(1));
        assert_eq!(text, "NAME\na-rathe…\n");
    }
}
