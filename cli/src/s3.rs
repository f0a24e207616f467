use std::path::PathBuf;

use clap::Args;
use harmonia_service::serve;
use harmonia_service::settings::SettingsError;

use crate::outcome::Failure;
use crate::role;

/// Runs an S3 server on a directory, for `harmonia-ci up` and the chart's quickstart
///
/// Configured by HARMONIA_CI_LISTEN, HARMONIA_CI_S3_ACCESS_KEY_ID and HARMONIA_CI_S3_SECRET_ACCESS_KEY_FILE: who has that key may do
/// everything, and nobody else anything.
#[derive(Args)]
pub struct Arguments {
    /// The directory; those below it are buckets
    #[arg(long, value_name = "DIR")]
    root: PathBuf,

    /// A bucket that is made if it is not there
    #[arg(long, value_name = "NAME")]
    bucket: Option<String>,
}

pub async fn run(arguments: Arguments) -> Result<(), Failure> {
    let settings = role::prepare()?;
    let address = settings.require("listen")?.to_owned();
    let key = settings.require("s3_access_key_id")?;
    let secret = settings.require_secret("s3_secret_access_key")?.read().map_err(SettingsError::from)?;
    let failed = |source| Failure::S3 { address: address.clone(), source };
    if let Some(bucket) = &arguments.bucket {
        std::fs::create_dir_all(arguments.root.join(bucket)).map_err(failed)?;
    }
    let (listener, _) = serve::bind(&address).await.map_err(failed)?;
    harmonia_s3::serve(&arguments.root, key, &secret, listener, role::stop()).await.map_err(failed)
}
