"""Who is who in a federation of real sites: keys, certificates, invitations, fingerprints and signatures.

What each secret is for, what a thief can do with it, and what ends that:

- **Root key** (`root/root.pem`, or on another machine): signs issuers. A thief makes an issuer with the next number,
  and so a server that every site accepts. Only a new federation ends that.
- **Issuer key** (server): signs certificates. Of sites they are of no use, since the server admits only those that it
  issued itself. But a thief who also controls the name or the route of the server can stand in for it, until
  `rotate`, and until each site has connected to the rotated server once.
- **TLS and identity key of the server**: the same as the issuer's for at most 90 days, and ended by `rotate`, which
  replaces both.
- **TLS key of a site**: a thief connects as the site for at most 90 days, and reads what is sent to it. It cannot
  answer, nor renew, since both need the identity key. `revoke` ends it.
- **Identity key of a site**, with its TLS key: a thief is the site. Two addresses within a minute suspend it;
  `revoke` ends it.
- **Invitation**, before it is used: a thief joins in the site's place, but its eight words differ, and the site's own
  attempt raises an alarm. `revoke` ends it, and so do 72 hours.

Without the call that compares the words the server, which is the certificate authority, can invent sites.
"""
