//! `/nodes`: pools, nodes, what each builds, and which drain.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use harmonia_queue::nodes::{self, Node};
use harmonia_queue::pages::{self, Busy, Pool};
use harmonia_queue::people::Scope;
use harmonia_service::moment::short;
use maud::{Markup, html};

use super::Web;
use super::frame::{Page, Trouble};
use super::parts::{badge, build_link, button, running, table};
use super::visitor::{Looking, Visitor};
use crate::api::DRAINED_BY_HAND;

/// The page.
pub async fn show(Looking(visitor): Looking, State(web): State<Arc<Web>>) -> Result<Response, Trouble> {
    web.live.version();
    let db = web.db().await;
    let (pools, nodes, busy) = (pages::pools(&db).await?, nodes::list(&db).await?, pages::busy(&db).await?);
    drop(db);
    let content = html! {
        h1 { "Nodes" }
        @for pool in &pools {
            @let list: Vec<&Node> = nodes.iter().filter(|node| node.pool == pool.name).collect();
            section { (head(pool)) (rows(&pool.name, &list, &busy, &visitor)) }
        }
        @if pools.is_empty() { p { "There is no pool of builders yet." } }
    };
    let rest = html! {};
    let page = Page {
        title: "Nodes",
        place: "/nodes",
        visitor: &visitor,
        again: Some("/nodes"),
        stale: false,
        content,
        rest,
    };
    Ok(page.into_response())
}

fn head(pool: &Pool) -> Markup {
    html! {
        h2 { "Pool " (pool.name) @if pool.at_maximum { " " span.badge.warn { "at its maximum" } } }
        p.legend { (pool.systems.join(", ")) " · " (pool.features.join(", ")) }
        @if let Some(note) = &pool.note { p.sentence { (note) } }
    }
}

fn rows(pool: &str, nodes: &[&Node], busy: &[Busy], visitor: &Visitor) -> Markup {
    table(
        &format!("Nodes of {pool}"),
        html! {
            thead { tr {
                th { "Node" } th { "State" } th.number { "Slots" } th.number { "Uploads" } th.number { "Speed" } th { "Builds" }
                @if visitor.may(Scope::Operate) { th { "Drain" } }
            } }
            tbody {
                @for node in nodes {
                    tr {
                        td { (node.name) @if let Some(kube) = &node.kube_node { @if *kube != node.name { br; span.faint { (kube) } } } }
                        td { (badge(node.state())) (drains(node)) }
                        td.number { (node.building) "/" (node.slots) }
                        td.number { (node.uploading) }
                        td.number { (format!("{:.2}", node.speed)) }
                        td { (holds(node.id, busy)) }
                        @if visitor.may(Scope::Operate) { td { (switch(node, visitor)) } }
                    }
                } @if nodes.is_empty() { tr { td colspan="7" { "It has no node." } } }
            }
        },
    )
}

fn drains(node: &Node) -> Markup {
    html! {
        @for drain in &node.drains {
            div.reason { (drain.reason) ", for " (short(drain.since)) @if let Some(left) = drain.left { "; " (short(left)) " left" } }
        }
    }
}

fn holds(node: i32, busy: &[Busy]) -> Markup {
    html! {
        ul.near {
            @for busy in busy.iter().filter(|busy| busy.node == node) {
                li { (build_link(busy.id, &busy.drv_path)) " " span.faint { (busy.phase) " for " (running(busy.time)) } }
            }
        }
    }
}

fn switch(node: &Node, visitor: &Visitor) -> Markup {
    match node.drains_for(DRAINED_BY_HAND) {
        Some(_) => button(
            visitor,
            &format!("/nodes/{}/resume", node.id),
            "Resume",
            &format!("Resume {}", node.name),
            "plain",
        ),
        None => button(
            visitor,
            &format!("/nodes/{}/drain", node.id),
            "Drain",
            &format!("Drain {}", node.name),
            "danger",
        ),
    }
}
