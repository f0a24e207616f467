use k8s_openapi::api::core::v1::ServiceAccount;

use super::{Wanted, metadata};

/// Builders run foreign code: they have no business with the API server.
pub fn build(wanted: &Wanted) -> ServiceAccount {
    ServiceAccount {
        metadata: metadata(wanted),
        automount_service_account_token: Some(false),
        ..ServiceAccount::default()
    }
}
