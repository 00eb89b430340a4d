// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {REGISTER, Roles} from "./Roles.sol";

/// Allow-list of addresses that may hold tokens. One registry serves all tokens.
contract IdentityRegistry is Roles {
    mapping(address account => bool) private verified;

    event IdentityRegistered(address indexed account);
    event IdentityRemoved(address indexed account);

    /// The addresses of `listed_` are on the list from the start.
    constructor(address owner_, address[] memory accounts, uint256[] memory roles, address[] memory listed_)
        Roles(owner_, accounts, roles)
    {
        for (uint256 i = 0; i < listed_.length; ++i) _register(listed_[i]);
    }

    function isVerified(address account) external view returns (bool) {
        return verified[account];
    }

    /// Idempotent: a repeat emits no event.
    function registerIdentity(address account) external onlyRole(REGISTER) {
        _register(account);
    }

    function batchRegisterIdentity(address[] calldata accounts) external onlyRole(REGISTER) {
        for (uint256 i = 0; i < accounts.length; ++i) _register(accounts[i]);
    }

    function deleteIdentity(address account) external onlyRole(REGISTER) {
        if (!verified[account]) return;
        verified[account] = false;
        emit IdentityRemoved(account);
    }

    function _register(address account) private {
        if (account == address(0)) revert ZeroAddress();
        if (verified[account]) return;
        verified[account] = true;
        emit IdentityRegistered(account);
    }
}
