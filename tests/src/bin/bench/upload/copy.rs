//! The baseline: `nix copy` of the same paths to the same server.

use harmonia_tests::press::Press;
use harmonia_tests::s3::REGION;

use super::goods::Goods;
use super::stage::{Cost, timed};

const BUCKET: &str = "nix-copy";

/// Copies into a new bucket, at zstd's default level, signed with the same key, with a listing of every path. Debian's Nix cannot authenticate to S3, so
/// everyone may write to that bucket. Without a daemon: all its work is in one process.
pub async fn nix_copy(goods: &Goods, press: &Press) -> Cost {
    let client = press.s3.client();
    client.create_bucket().bucket(BUCKET).send().await.expect("make a bucket");
    let policy = serde_json::json!({
        "Version": "2012-10-17",
        "Statement": [{
            "Effect": "Allow",
            "Principal": "*",
            "Action": ["s3:GetObject", "s3:PutObject"],
            "Resource": format!("arn:aws:s3:::{BUCKET}/*"),
        }],
    });
    let policy = client.put_bucket_policy().bucket(BUCKET).policy(policy.to_string());
    policy.send().await.expect("open the bucket");
    let to = format!(
        "s3://{BUCKET}?endpoint={}&scheme=http&region={REGION}&compression=zstd&compression-level=3&write-nar-listing=true\
         &secret-key={}",
        press.s3.endpoint,
        press.key_file().display(),
    );
    // It remembers what a bucket of that name has.
    let memory = tempfile::tempdir().expect("a directory");
    let mut command = goods.nix.command("nix");
    command
        .env("NIX_REMOTE", format!("local?root={}", goods.nix.root().display()))
        .env("XDG_CACHE_HOME", memory.path())
        .args(["copy", "--quiet", "--no-check-sigs", "--to", &to])
        .args(goods.paths.keys().map(ToString::to_string));
    tokio::task::block_in_place(|| timed(&mut command, &[]).0)
}
