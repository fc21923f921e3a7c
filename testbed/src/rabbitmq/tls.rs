//! Certificates for a node, and for nobody else.

use std::fs;
use std::path::Path;

use anyhow::Result;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

pub(super) const CA_FILE: &str = "ca.pem";

/// Writes a certificate for `localhost` and an authority of its own that vouches for it, and gives
/// the settings of a listener with them.
pub(super) fn listener(folder: &Path, port: u16) -> Result<Vec<String>> {
    let mut authority = CertificateParams::new(Vec::new())?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let name = "tierline testbed";
    authority.distinguished_name.push(DnType::CommonName, name);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;
    let key = KeyPair::generate()?;
    let own = CertificateParams::new(vec!["localhost".to_owned()])?;
    let own = own.signed_by(&key, &authority)?;
    fs::write(folder.join(CA_FILE), authority.pem())?;
    fs::write(folder.join("own.pem"), own.pem())?;
    fs::write(folder.join("own.key"), key.serialize_pem())?;
    let file = |name: &str| folder.join(name).display().to_string();
    Ok(vec![
        format!("listeners.ssl.default = 127.0.0.1:{port}"),
        format!("ssl_options.cacertfile = {}", file(CA_FILE)),
        format!("ssl_options.certfile = {}", file("own.pem")),
        format!("ssl_options.keyfile = {}", file("own.key")),
        "ssl_options.verify = verify_none".to_owned(),
        "ssl_options.fail_if_no_peer_cert = false".to_owned(),
    ])
}
