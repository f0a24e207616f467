//! What browsers load besides pages: part of the binary, under names that change with what is in them.

use std::sync::LazyLock;

use axum::extract::Path;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use flate2::Compression;
use harmonia_nix::Sha256;
use harmonia_service::problem::Problem;

use super::frame::Trouble;
use super::guard::{accepts_gzip, packed};

const SCRIPT: &str = "text/javascript; charset=utf-8";

struct Asset {
    name: &'static str,
    kind: &'static str,
    plain: &'static [u8],
    packed: Option<Vec<u8>>,
    tag: String,
}

static ASSETS: LazyLock<Vec<Asset>> = LazyLock::new(|| {
    let asset = |name, kind, plain: &'static [u8]| Asset {
        name,
        kind,
        plain,
        packed: packed(plain, Compression::best()),
        tag: Sha256::of(plain).hex()[..16].to_owned(),
    };
    vec![
        asset("style.css", "text/css; charset=utf-8", include_bytes!("../../assets/style.css")),
        asset("pages.js", SCRIPT, include_bytes!("../../assets/pages.js")),
        asset("htmx.min.js", SCRIPT, include_bytes!("../../assets/htmx.min.js")),
        asset("sse.min.js", SCRIPT, include_bytes!("../../assets/sse.min.js")),
        asset("idiomorph-ext.min.js", SCRIPT, include_bytes!("../../assets/idiomorph-ext.min.js")),
        asset("icon.svg", "image/svg+xml", include_bytes!("../../assets/icon.svg")),
    ]
});

/// Where one of them is.
pub fn address(name: &str) -> String {
    let tag = ASSETS.iter().find(|asset| asset.name == name).map_or("", |asset| &asset.tag);
    format!("/assets/{tag}-{name}")
}

/// One of them, to be kept for ever: another one has another name.
pub async fn serve(Path(name): Path<String>, headers: HeaderMap) -> Response {
    let found =
        ASSETS.iter().find(|asset| name.strip_prefix(&asset.tag) == Some(&format!("-{}", asset.name)));
    let Some(asset) = found else {
        return Trouble::from(Problem::not_found(
            "there is no such file in this release: load the page again",
        ))
        .into_response();
    };
    let tag = format!("\"{}\"", asset.tag);
    let always = [
        (header::ETAG, tag.clone()),
        (header::CACHE_CONTROL, "public, max-age=31536000, immutable".to_owned()),
        (header::VARY, "accept-encoding".to_owned()),
    ];
    if headers.get(header::IF_NONE_MATCH).is_some_and(|known| known.as_bytes() == tag.as_bytes()) {
        return (StatusCode::NOT_MODIFIED, always).into_response();
    }
    let kind = [(header::CONTENT_TYPE, asset.kind)];
    match &asset.packed {
        Some(packed) if accepts_gzip(&headers) => {
            (always, kind, [(header::CONTENT_ENCODING, "gzip")], packed.clone()).into_response()
        }
        _ => (always, kind, asset.plain).into_response(),
    }
}
