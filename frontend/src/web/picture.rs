//! Pictures, drawn by the server. Geometry is in attributes and colours in classes: no style is within a page.

use std::collections::{BTreeMap, HashMap};

use harmonia_queue::builds::name_of;
use harmonia_queue::pages::{Graph, Layer, Minute, Step};
use maud::{Markup, html};

use super::parts::{number, seconds, tone, words};

/// A bar of parts, as wide as there is room.
pub fn progress(parts: &[(&str, i64)]) -> Markup {
    let all = parts.iter().map(|(_, count)| count).sum::<i64>().max(1) as f64;
    let width = |count: i64| 1000.0 * count as f64 / all;
    let begins = parts.iter().scan(0, |before, (_, count)| {
        *before += count;
        Some(width(*before - count))
    });
    html! {
        svg.progress viewBox="0 0 1000 8" preserveAspectRatio="none" role="img" aria-label=(in_words(parts)) {
            rect.empty width="1000" height="8" {}
            @for ((state, count), begin) in parts.iter().zip(begins).filter(|((_, count), _)| *count > 0) {
                rect class=(tone(state)) x=(round(begin)) width=(round(width(*count))) height="8" {}
            }
        }
    }
}

fn in_words(parts: &[(&str, i64)]) -> String {
    let there = parts.iter().filter(|(_, count)| *count > 0);
    let said: Vec<String> =
        there.map(|(state, count)| format!("{} {}", number(*count), words(state))).collect();
    if said.is_empty() { "nothing yet".to_owned() } else { said.join(", ") }
}

fn round(number: f64) -> String {
    format!("{number:.1}")
}

/// Builds by minute, the last hour.
pub fn throughput(minutes: &[Minute]) -> Markup {
    let most = minutes.iter().map(|minute| minute.succeeded + minute.failed).max().unwrap_or(0).max(1) as f64;
    let (good, bad) =
        minutes.iter().fold((0, 0), |(good, bad), minute| (good + minute.succeeded, bad + minute.failed));
    html! {
        svg.chart viewBox="0 0 600 96" preserveAspectRatio="none" role="img"
            aria-label=(format!("in the last hour {} builds succeeded and {} failed, by minute", number(good), number(bad))) {
            line.axis x1="0" y1="95.5" x2="600" y2="95.5" {}
            @for (index, minute) in minutes.iter().enumerate() {
                @let (good, bad) = (90.0 * minute.succeeded as f64 / most, 90.0 * minute.failed as f64 / most);
                @if good > 0.0 { rect.good x=(index * 10 + 1) y=(round(95.0 - good)) width="8" height=(round(good)) {} }
                @if bad > 0.0 { rect.bad x=(index * 10 + 1) y=(round(95.0 - good - bad)) width="8" height=(round(bad)) {} }
            }
        }
    }
}

/// A part of all builder time that was used, and the part that is owed.
pub fn share(name: &str, used: f64, owed: f64) -> Markup {
    let label =
        format!("{name} used {:.0} % of the builders' time and is owed {:.0} %", used * 100.0, owed * 100.0);
    html! {
        svg.share viewBox="0 0 1000 16" preserveAspectRatio="none" role="img" aria-label=(label) {
            rect.empty width="1000" height="16" {}
            rect class=(if used > owed * 1.25 { "warn" } else { "busy" }) y="3" width=(round(used * 1000.0)) height="10" {}
            rect.mark x=(round((owed * 1000.0 - 2.0).max(0.0))) width="4" height="16" {}
        }
    }
}

/// When one build of many waited and ran.
pub fn span(step: &Step, waited_from: f64, all: f64) -> Markup {
    let place = |moment: f64| 1000.0 * moment.clamp(0.0, all) / all.max(0.001);
    let (from, claimed, ended) = (place(waited_from), place(step.claimed), place(step.ended));
    let label = format!(
        "waited {}, ran {} from {} on",
        seconds((step.claimed - waited_from).max(0.0)),
        seconds((step.ended - step.claimed).max(0.0)),
        seconds(step.claimed.max(0.0))
    );
    html! {
        svg.span viewBox="0 0 1000 14" preserveAspectRatio="none" role="img" aria-label=(label) {
            title { (label) }
            rect.empty width="1000" height="14" {}
            rect.wait x=(round(from)) y="6" width=(round((claimed - from).max(0.0))) height="2" {}
            rect class=(tone(&step.state)) x=(round(claimed)) y="2" width=(round((ended - claimed).max(3.0))) height="10" {}
        }
    }
}

/// How many are in which state.
type Parts<'a> = Vec<(&'a str, i64)>;

/// States from the bottom of a column to its top.
const ORDER: &[&str] = &["succeeded", "cached", "running", "waiting", "cancelled", "dep_failed", "failed"];
/// So many builds are drawn one by one; more become columns.
pub const DRAWN: i64 = 120;
const STEP: f64 = 132.0;
const ROW: f64 = 26.0;

/// A graph of any size: a column for each depth, as high as the logarithm of what is there, and of it the states. Ten thousand
/// nodes are as readable as a hundred, and what is stuck where is seen at once; single builds and their edges are on the
/// page of each build.
pub fn layers(layers: &[Layer]) -> Markup {
    let mut columns: BTreeMap<i32, Parts<'_>> = BTreeMap::new();
    for layer in layers {
        columns.entry(layer.depth).or_default().push((&layer.state, layer.builds));
    }
    let sum = |column: &[(&str, i64)]| column.iter().map(|(_, count)| count).sum::<i64>();
    let most = columns.values().map(|column| sum(column)).max().unwrap_or(1) as f64;
    let columns = merged(columns);
    let width = 1000.0 / columns.len().max(1) as f64;
    html! {
        svg.layers viewBox="0 0 1000 210" role="img" aria-label="builds by depth of the graph, left those that need nothing; the states of each depth are below" {
            @for (index, (from, to, column)) in columns.iter().enumerate() {
                @let all = sum(column);
                @let height = 160.0 * (1.0 + all as f64).ln() / (1.0 + most).ln();
                @let x = index as f64 * width;
                @let depth = if from == to { format!("depth {from}") } else { format!("depths {from} to {to}") };
                g {
                    title { (depth) ": " (in_words(column)) }
                    @for (y, part, state) in stack(column, height) {
                        rect class=(tone(state)) x=(round(x + width * 0.06)) y=(round(180.0 - y - part)) width=(round(width * 0.88)) height=(round(part)) {}
                    }
                    @if width >= 24.0 {
                        text x=(round(x + width / 2.0)) y=(round(174.0 - height)) { (number(all)) }
                        text.faint x=(round(x + width / 2.0)) y="198" { @if from == to { (from) } @else { (from) "–" (to) } }
                    }
                }
            }
        }
    }
}

/// At most fifty columns: deeper graphs have several depths in one.
fn merged(columns: BTreeMap<i32, Parts<'_>>) -> Vec<(i32, i32, Parts<'_>)> {
    let each = columns.len().div_ceil(50).max(1);
    let columns: Vec<(i32, Parts<'_>)> = columns.into_iter().collect();
    columns
        .chunks(each)
        .filter_map(|chunk| {
            let (from, to) = (chunk.first()?.0, chunk.last()?.0);
            let mut parts: Parts<'_> = Vec::new();
            for (state, count) in chunk.iter().flat_map(|(_, column)| column) {
                match parts.iter_mut().find(|(known, _)| known == state) {
                    Some((_, all)) => *all += count,
                    None => parts.push((state, *count)),
                }
            }
            Some((from, to, parts))
        })
        .collect()
}

/// Where each part of a column begins, how high it is, and its state. Whatever is there is seen.
fn stack<'a>(column: &[(&'a str, i64)], height: f64) -> Vec<(f64, f64, &'a str)> {
    let all: i64 = column.iter().map(|(_, count)| count).sum();
    let mut parts: Vec<_> = column.to_vec();
    parts.sort_by_key(|(state, _)| ORDER.iter().position(|known| known == state));
    let least = 3.0_f64.min(height / parts.len().max(1) as f64);
    let room = height - least * parts.len() as f64;
    let mut at = 0.0;
    parts
        .into_iter()
        .map(|(state, count)| {
            let part = least + room * count as f64 / all.max(1) as f64;
            at += part;
            (at - part, part, state)
        })
        .collect()
}

/// A small graph, build by build: what needs nothing is on the left.
pub fn graph(graph: &Graph) -> Markup {
    let Graph { vertices, edges } = graph;
    let mut rows: BTreeMap<i32, usize> = BTreeMap::new();
    let places: HashMap<i64, (f64, f64)> = vertices
        .iter()
        .map(|vertex| {
            let row = rows.entry(vertex.depth).or_default();
            *row += 1;
            (vertex.id, (f64::from(vertex.depth) * STEP + 10.0, *row as f64 * ROW - ROW / 2.0))
        })
        .collect();
    let width = vertices
        .iter()
        .map(|vertex| vertex.depth)
        .max()
        .map_or(0.0, |depth| f64::from(depth + 1) * STEP + 10.0);
    let height = rows.values().max().map_or(0.0, |row| *row as f64 * ROW);
    html! {
        div.scroll role="region" aria-label="Dependency graph" tabindex="0" {
            svg.graph width=(round(width)) height=(round(height)) viewBox=(format!("0 0 {width:.0} {height:.0}")) {
                @for (referrer, input) in edges {
                    @if let (Some((x2, y2)), Some((x1, y1))) = (places.get(referrer), places.get(input)) {
                        path d=(format!("M{:.0} {y1:.0}C{:.0} {y1:.0} {:.0} {y2:.0} {:.0} {y2:.0}", x1 + 112.0, x1 + 126.0, x2 - 14.0, x2)) {}
                    }
                }
                @for vertex in vertices {
                    @if let Some((x, y)) = places.get(&vertex.id) {
                        a href=(format!("/builds/{}", vertex.id)) {
                            title { (name_of(&vertex.drv_path)) ": " (words(&vertex.state)) }
                            rect class=(tone(&vertex.state)) x=(round(*x)) y=(round(y - 9.0)) width="112" height="18" rx="4" {}
                            text x=(round(x + 6.0)) y=(round(y + 4.0)) { (cut(name_of(&vertex.drv_path))) }
                        }
                    }
                }
            }
        }
    }
}

fn cut(name: &str) -> String {
    if name.chars().count() <= 17 { name.to_owned() } else { name.chars().take(16).chain(['…']).collect() }
}

#[cfg(test)]
mod tests {
    use harmonia_queue::pages::Vertex;

    use super::*;

    #[test]
    fn whatever_is_there_is_seen_and_the_column_is_as_high_as_it_should_be() {
        let parts = stack(&[("failed", 1), ("succeeded", 9_999)], 100.0);
        assert_eq!(parts.iter().map(|(_, _, state)| *state).collect::<Vec<_>>(), ["succeeded", "failed"]);
        assert!(parts.iter().all(|(_, part, _)| *part >= 3.0), "{parts:?}");
        assert!((parts.iter().map(|(_, part, _)| part).sum::<f64>() - 100.0).abs() < 0.01, "{parts:?}");
    }

    #[test]
    fn a_deep_graph_has_no_more_columns_than_can_be_read() {
        let columns = (0..1234).map(|depth| (depth, vec![("waiting", 2)])).collect();
        let columns = merged(columns);
        assert!(columns.len() <= 50);
        assert_eq!(columns.iter().map(|(_, _, parts)| parts[0].1).sum::<i64>(), 2468);
    }

    #[test]
    fn names_are_escaped_in_pictures() {
        let vertex = Vertex {
            id: 1,
            drv_path: "/nix/store/x-<script>.drv".to_owned(),
            depth: 0,
            state: "failed".to_owned(),
        };
        let text = graph(&Graph { vertices: vec![vertex], edges: Vec::new() }).into_string();
        assert!(text.contains("&lt;script&gt;") && !text.contains("<script>"), "{text}");
    }
}
