//! Which build somebody means.

use harmonia_service::api::{Build, Page};

use crate::client::{ApiError, Client};

/// A build by its number, its `.drv` path, an output path, or an attribute of the latest evaluation.
pub async fn find(client: &Client, target: &str) -> Result<Build, ApiError> {
    let page: Page<Build> = client.find("builds", &[("target", target)]).await?;
    page.items.into_iter().next().ok_or_else(|| ApiError::Refused {
        status: reqwest::StatusCode::NOT_FOUND,
        detail: format!("there is no build {target}"),
    })
}
